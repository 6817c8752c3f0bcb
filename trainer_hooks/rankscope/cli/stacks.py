"""Asking a rank for the Python stacks of all its threads.

They come from py-spy if it is installed and permitted, else from the hook, which answers a signal (stack_dump.py). That
signal kills a process without a handler for it. So before it is sent, three things are checked: the process holds the
lock of the record and has the record's owner (lock_holder.py), has the file for the answer, and catches the signal.
Root asks other users' processes, which may be hostile: their output is limited, and whoever prints it escapes it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any, TypeGuard

from rankscope.cli.living_ranks import RecordedRank
from rankscope.cli.lock_holder import NotTheRankError, Process, process_of
from rankscope.cli.py_spy import WITHIN, stacks_by_py_spy
from rankscope.process.ending import catches
from rankscope.process.stack_dump import MEMORY_FILE
from rankscope.record.process_stat import PROCFS
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.stopped import describe_stop, read_state

ANSWER_WITHIN = 5.0  # seconds; a process that waits in the kernel does not answer
COMPLETE_AFTER = 0.1  # seconds without a further line; a dump takes a millisecond
LOOK_EVERY = 0.01
ANSWER_LIMIT = 1024**2  # bytes; ten times faulthandler's maximum of 100 threads
LARGEST_DESCRIPTOR = 2**31
COMMAND_LINE = "Process "
"""The begin of py-spy's line with the arguments of the process, which may have a password."""
IN_THE_KERNEL = b"D"
PUNCH_HOLE = 3
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""


class NoStacksError(Exception):
    """A rank's stacks are not available; the message has the reason."""


def stacks(rank: RecordedRank, *, with_py_spy: bool = True, within: float = WITHIN + ANSWER_WITHIN) -> str:
    """Return the stacks of all threads of a rank, within some seconds. Raises NoStacksError.

    A stopped process gets no signal: it would handle that when it continues.
    """
    pid = rank.snapshot.lock_pid
    if not pid:
        raise NoStacksError("its process is in another container and not visible from here")
    deadline, stop = time.monotonic() + within, describe_stop(pid)
    try:
        with process_of(rank.snapshot.path, pid, rank.owner) as process:
            is_still = bool(stop) or kernel_state(pid)[0] == IN_THE_KERNEL
            spied = with_py_spy and stacks_by_py_spy(pid, ANSWER_LIMIT, min(within, WITHIN), is_still=is_still)
            if stop and not spied:
                raise NoStacksError(stop)
            text = spied or _by_signal(rank, process, deadline)
    except NotTheRankError as error:
        raise NoStacksError(str(error)) from error
    is_complete = len(text.encode(errors="replace")) < ANSWER_LIMIT
    text = "\n".join(line for line in text.strip().split("\n") if not line.startswith(COMMAND_LINE))
    return text if is_complete else f"{text}\n(cut off after {ANSWER_LIMIT} bytes)"


def describe_state(pid: int) -> str:
    """Return why a process cannot run: what stops it, or the kernel's function that it waits in. Else nothing."""
    if stop := describe_stop(pid):
        return stop
    state, function = kernel_state(pid)
    where = f", {function}" if function else ""
    return f"uninterruptible in the kernel (state D{where})" if state == IN_THE_KERNEL else ""


def kernel_state(pid: int, procfs: Path = PROCFS) -> tuple[bytes, str]:
    """Return the state of a process's main thread, and the kernel's function that it waits in, if they are known."""
    try:
        state = read_state((procfs / str(pid) / "stat").read_bytes())
    except (OSError, IndexError):
        return b"", ""
    try:
        function = (procfs / str(pid) / "wchan").read_text()
    except (OSError, UnicodeDecodeError):
        function = ""
    return state, function if function.isidentifier() else ""


def _by_signal(rank: RecordedRank, process: Process, deadline: float) -> str:
    number, answer_path = _signal_and_file(rank.snapshot)
    try:
        descriptor = _open_answer(answer_path, rank.owner)
    except OSError as error:
        raise NoStacksError(f"{answer_path}: {error.strerror}; run this as the job's user") from error
    try:
        before = os.fstat(descriptor).st_size
        if not catches(process.pid, number):
            raise NoStacksError(f"its process no longer handles signal {number}")
        process.verify()
        process.send(number)
        return _answer(descriptor, before, process.pid, deadline)
    except OSError as error:
        raise NoStacksError(error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _open_answer(path: Path, owner: int) -> int:
    """Open the file for the answer if it is an in-memory file of the rank's owner; never a device, pipe or mount."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_uid != owner:
            raise NoStacksError("its process no longer has the file for its stacks")
        return os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)


def _signal_and_file(snapshot: RankSnapshot) -> tuple[int, Path]:
    """Return the signal and the file for the answer. Raises NoStacksError if either is not as the hook makes it."""
    dump = snapshot.info.get("stacks")
    request: dict[str, Any] = dump if isinstance(dump, dict) else {}
    number, descriptor = request.get("signal"), request.get("descriptor")
    # Only ever send a real-time signal, whatever the record says.
    if not (_is_within(number, signal.SIGRTMIN, signal.SIGRTMAX) and _is_within(descriptor, 0, LARGEST_DESCRIPTOR)):
        raise NoStacksError("its hook has no signal for its stacks; install py-spy")
    path = Path(f"/proc/{snapshot.lock_pid}/fd/{descriptor}")
    try:
        target = str(path.readlink())
    except OSError as error:
        raise NoStacksError(f"{path}: {error.strerror}; run this as the job's user") from error
    if not target.startswith(f"/memfd:{MEMORY_FILE}"):
        raise NoStacksError("its process no longer has the file for its stacks")
    return number, path


def _is_within(number: object, least: int, largest: int) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= largest


def _answer(descriptor: int, before: int, pid: int, deadline: float) -> str:
    """Return what is written after `before` bytes, once it is complete. Raises NoStacksError if nothing is."""
    size, changed, began = before, time.monotonic(), time.monotonic()
    deadline = min(deadline, began + ANSWER_WITHIN)
    while size <= before or (size < before + ANSWER_LIMIT and time.monotonic() - changed < COMPLETE_AFTER):
        if time.monotonic() > deadline:
            if size > before:
                break  # it never stops writing
            raise NoStacksError(f"no answer within {deadline - began:.1f} s{_silence(pid)}")
        time.sleep(LOOK_EVERY)
        now = os.fstat(descriptor).st_size
        if now != size:
            size, changed = now, time.monotonic()
    answer = os.pread(descriptor, min(size - before, ANSWER_LIMIT), before)
    _free(descriptor, before, len(answer))
    return answer.decode(errors="replace")


def _free(descriptor: int, begin: int, size: int) -> None:
    """Free the memory of an answer that was read: else many answers would fill the job's memory.

    The file keeps its size, and so its writer's position in it is still at the end. The first page also has the end of
    the answer before.
    """
    size, begin = size + begin % mmap.PAGESIZE, begin - begin % mmap.PAGESIZE
    if (fallocate := getattr(ctypes.CDLL(None), "fallocate", None)) is not None:
        fallocate(descriptor, PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(size))


def _silence(pid: int) -> str:
    """Return what the kernel shows of a process that does not answer, as the end of a sentence."""
    if reason := describe_state(pid):
        return f": {reason}"
    state, function = kernel_state(pid)
    return f" (state {state.decode()}{f', {function}' * bool(function)})" if state else ""
