"""The command `rankscope stacks`: it prints the Python stacks of all threads of all living ranks on this machine.

They come from py-spy if it is installed and permitted, else from the hook, which answers a signal (stack_dump.py). That
signal kills a process without a handler for it. So before it is sent, three things are checked: the process holds the
lock of the record and has the record's owner (lock_holder.py), has the file for the answer, and catches the signal.
Root asks other users' processes, which may be hostile: their output is limited and escaped.
"""

from __future__ import annotations

import os
import pwd
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from rankscope.cli.living_ranks import RecordedRank, RunDirectoryError, living_ranks
from rankscope.cli.lock_holder import NotTheRankError, Process, process_of
from rankscope.cli.printable import printable
from rankscope.cli.py_spy import stacks_by_py_spy
from rankscope.process.ending import catches
from rankscope.process.stack_dump import MEMORY_FILE
from rankscope.record.group_name import members
from rankscope.record.listing import take_turns
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.stopped import is_stopped
from rankscope.record.writer import default_run_dirs

ANSWER_WITHIN = 5.0  # seconds; a stopped process does not answer
COMPLETE_AFTER = 0.1  # seconds without a further line; a dump takes a millisecond
LOOK_EVERY = 0.01
ANSWER_LIMIT = 1024**2  # bytes; ten times faulthandler's maximum of 100 threads
RANKS_LIMIT = 256  # as in the exporter
OWNER_WITHIN = 120.0  # seconds for all ranks of one user, so that no user delays the others' stacks
NAME_LIMIT = 200  # characters, as in a label
LARGEST_DESCRIPTOR = 2**31
NAMED = 8  # ranks listed if none matches


class NoStacksError(Exception):
    """A rank's stacks are not available; the message has the reason."""


def show(run: str | None, rank: str | None, directory: Path | None, out: TextIO = sys.stdout) -> int:
    """Print the stacks of the selected ranks. Returns the exit status: 1 if a rank does not answer, 2 if there is none.

    `directory` None means the default run directories. Root gets the ranks of all users, other users their own.
    """
    directories = [directory] if directory else default_run_dirs()
    living = _living(directories)
    wanted = [one for one in living if _is_wanted(one, run, rank)]
    permitted = [one for one in wanted if _may_ask(one)]
    if not permitted:
        others = f"; {len(wanted)} of other users: run this as the job's user" if wanted else _available(living)
        selection = ("" if rank is None else f" {rank}") + ("" if run is None else f" of run {run}")
        _warn(f"no living rank{selection} in {', '.join(map(str, directories))}{others}")
        return 2
    if len(permitted) > RANKS_LIMIT:
        _warn(f"{len(permitted)} ranks, showing only {RANKS_LIMIT}; select with --run and --rank")
    return _show(sorted(take_turns(permitted)[:RANKS_LIMIT], key=_order), out)


def _show(ranks: Iterable[RecordedRank], out: TextIO) -> int:
    spent: Counter[int] = Counter()  # milliseconds by owner
    status = 0
    for one in ranks:
        began = time.monotonic()
        try:
            if spent[one.owner] > 1000 * OWNER_WITHIN:
                raise NoStacksError(f"skipped: other ranks of the same user took {OWNER_WITHIN:.0f} s")
            text = stacks(one)
        except NoStacksError as error:
            text, status = f"no stacks: {error}", 1
        spent[one.owner] += round(1000 * (time.monotonic() - began))
        lines = "\n".join(map(printable, text.strip().split("\n")))
        out.write(f"{heading(one.snapshot)}{_user(one.owner)}\n{lines}\n\n")
        out.flush()
    return status


def _may_ask(one: RecordedRank) -> bool:
    return os.geteuid() in (0, one.owner)


def _warn(text: str) -> None:
    print(f"rankscope stacks: {printable(text)}", file=sys.stderr)  # noqa: T201 - a command


def _available(living: Iterable[RecordedRank]) -> str:
    """Return a list of the ranks that this user may ask, as the end of a message."""
    infos = [one.snapshot.info for one in living if _may_ask(one)]
    names = [f"{info.get('run')} rank {info.get('rank')}" for info in infos]
    return f"; available: {', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)}" if names else ""


def heading(snapshot: RankSnapshot) -> str:
    """Return the line above a rank's stacks: its run, rank and process ID, and its phase and for how long."""
    info = snapshot.info
    since = snapshot.read_monotonic - snapshot.phase_since
    pid = snapshot.lock_pid or info.get("pid")
    run, rank, number, phase = (
        printable(str(one), NAME_LIMIT) for one in (info.get("run"), info.get("rank"), pid, snapshot.phase)
    )
    return (
        f"=== run {run}, rank {rank}, pid {number}: {phase} for {since:.1f} s, "
        f"step {snapshot['steps']:.0f}{_collective(snapshot)}{', stopped' * is_stopped(snapshot.lock_pid)}"
    )


def _user(owner: int) -> str:
    """Return the owner, if it is another user: any user can choose the name of a run."""
    if owner == os.geteuid():
        return ""
    try:
        return f", of user {printable(pwd.getpwuid(owner).pw_name, NAME_LIMIT)}"
    except KeyError:
        return f", of user {owner}"


def _collective(snapshot: RankSnapshot) -> str:
    if not snapshot.open_operation:
        return ""
    group = snapshot.open_group
    where = f" of ranks {printable(group, NAME_LIMIT)}, number {snapshot.issued[group]:.0f}" if group else ""
    return f", in {snapshot.open_operation}{where}"


def stacks(rank: RecordedRank, *, with_py_spy: bool = True) -> str:
    """Return the stacks of all threads of a rank. Raises NoStacksError."""
    pid = rank.snapshot.lock_pid
    if not pid:
        raise NoStacksError("its process is in another container and not visible from here")
    try:
        with process_of(rank.snapshot.path, pid, rank.owner) as process:
            spied = stacks_by_py_spy(pid, ANSWER_LIMIT) if with_py_spy else ""
            text = spied or _by_signal(rank, process)
    except NotTheRankError as error:
        raise NoStacksError(str(error)) from error
    is_complete = len(text.encode(errors="replace")) < ANSWER_LIMIT
    return text if is_complete else f"{text}\n(cut off after {ANSWER_LIMIT} bytes)"


def _living(directories: Iterable[Path]) -> list[RecordedRank]:
    return sorted((one for directory in directories for one in _living_in(directory)), key=_order)


def _living_in(directory: Path) -> list[RecordedRank]:
    try:
        return living_ranks(directory)
    except RunDirectoryError as error:
        _warn(str(error))
        return []


def _order(one: RecordedRank) -> tuple[str, int, int]:
    return one.run, int(one.rank), one.owner


def _is_wanted(one: RecordedRank, run: str | None, rank: str | None) -> bool:
    return run in (None, one.run) and (rank in (None, one.rank) or int(one.rank) in members(rank or ""))


def _by_signal(rank: RecordedRank, process: Process) -> str:
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
        return _answer(descriptor, before)
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
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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


def _answer(descriptor: int, before: int) -> str:
    """Return what is written after `before` bytes, once it is complete. Raises NoStacksError if nothing is."""
    size, changed, began = before, time.monotonic(), time.monotonic()
    while size <= before or (size < before + ANSWER_LIMIT and time.monotonic() - changed < COMPLETE_AFTER):
        if time.monotonic() - began > ANSWER_WITHIN:
            if size > before:
                break  # it never stops writing
            raise NoStacksError(f"no answer within {ANSWER_WITHIN:.0f} s: the process is stopped, or blocks the signal")
        time.sleep(LOOK_EVERY)
        now = os.fstat(descriptor).st_size
        if now != size:
            size, changed = now, time.monotonic()
    return os.pread(descriptor, min(size - before, ANSWER_LIMIT), before).decode(errors="replace")
