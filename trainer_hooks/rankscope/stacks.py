"""The command `rankscope stacks`: where every thread of every living rank of this machine is in its Python code.

By py-spy where it is installed and may look, else by the hook's own answer to a signal (stack_dump.py). That signal
kills a process that has no handler for it, so three things are made sure of before it is sent: that the process holds
the lock of the record, that it has the file for the answer, and that it catches the signal now.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rankscope import record
from rankscope.rank_reader import UnreadableRecordError, read_rank
from rankscope.rank_snapshot import RankSnapshot
from rankscope.rank_writer import SHARED_MEMORY_RUN_DIR, SUFFIX, SYSTEM_RUN_DIR
from rankscope.stack_dump import MEMORY_FILE

PY_SPY_WITHIN = 30.0  # seconds; it reads the symbols of every library first
ANSWER_WITHIN = 5.0  # seconds; a stopped process does not answer
COMPLETE_AFTER = 0.1  # seconds without a further line; a dump takes a millisecond
LOOK_EVERY = 0.01
NAMED = 8  # ranks, where none is as it was asked for


class NoStacksError(Exception):
    """Why a rank's stacks cannot be had."""


def show(run: str | None, rank: str | None, directory: Path | None, out: TextIO = sys.stdout) -> int:
    """Print the stacks of the living ranks that are asked for. The exit status: 1 if one does not answer, 2 if none is.

    `directory` None is where ranks leave their records by default.
    """
    directories = _directories(directory)
    living = _living(directories)
    found = [snapshot for snapshot in living if _is_wanted(snapshot, run, rank)]
    if not found:
        print(f"rankscope stacks: {_none(directories, living, run, rank)}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    status = 0
    for snapshot in found:
        try:
            text = stacks(snapshot)
        except NoStacksError as error:
            text, status = f"no stacks: {error}", 1
        out.write(f"{heading(snapshot)}\n{text.strip()}\n\n")
    return status


def _none(directories: Iterable[Path], living: Sequence[RankSnapshot], run: str | None, rank: str | None) -> str:
    """That none is as it was asked for, where that was looked for, and which there are."""
    asked = ("" if rank is None else f" {rank}") + ("" if run is None else f" of run {run}")
    names = [f"{snapshot.info.get('run')} rank {snapshot.info.get('rank')}" for snapshot in living]
    there = f"; there are: {', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)}" if names else ""
    text = f"no living rank{asked} in {', '.join(map(str, directories))}{there}"
    return "".join(character if character.isprintable() else "?" for character in text)  # names are anybody's


def heading(snapshot: RankSnapshot) -> str:
    """Who it is, and what it has been doing for how long."""
    info = snapshot.info
    since = snapshot.read_monotonic - snapshot.phase_since
    pid = snapshot.lock_pid or info.get("pid")
    return (
        f"=== run {info.get('run')}, rank {info.get('rank')}, pid {pid}: {snapshot.phase} for {since:.1f} s, "
        f"step {snapshot['steps']:.0f}{_collective(snapshot)}"
    )


def _collective(snapshot: RankSnapshot) -> str:
    op, group = int(snapshot["collective_op"]), int(snapshot["collective_group"])
    if not 0 < op <= len(record.OPS):
        return ""
    text = f", in {record.OPS[op - 1]}"
    if group < len(snapshot.groups):
        text += f" with {snapshot.groups[group]}, number {snapshot.many('group_collectives')[group]:.0f}"
    return text


def stacks(snapshot: RankSnapshot) -> str:
    """The stacks of all threads. Raises NoStacksError."""
    if not snapshot.lock_pid:
        raise NoStacksError("its process cannot be seen from here, as it is in another container")
    return _by_py_spy(snapshot.lock_pid) or _by_signal(snapshot)


def _directories(directory: Path | None) -> Sequence[Path]:
    if directory or os.environ.get("RANKSCOPE_RUN_DIR"):
        return [directory or Path(os.environ["RANKSCOPE_RUN_DIR"])]
    return [SYSTEM_RUN_DIR, SHARED_MEMORY_RUN_DIR]


def _living(directories: Iterable[Path]) -> list[RankSnapshot]:
    paths = (path for directory in directories for path in directory.glob(f"[!.]*{SUFFIX}"))
    found = (_read(path) for path in paths)
    return sorted((snapshot for snapshot in found if snapshot and snapshot.alive), key=_order)


def _read(path: Path) -> RankSnapshot | None:
    try:
        return read_rank(path)
    except (FileNotFoundError, UnreadableRecordError):
        return None


def _order(snapshot: RankSnapshot) -> tuple[str, int, str]:
    run, rank = str(snapshot.info.get("run")), str(snapshot.info.get("rank"))
    return run, int(rank) if rank.isdecimal() else 0, rank


def _is_wanted(snapshot: RankSnapshot, run: str | None, rank: str | None) -> bool:
    return run in (None, snapshot.info.get("run")) and rank in (None, snapshot.info.get("rank"))


def _by_py_spy(pid: int) -> str:
    """Empty where it is not installed, or not permitted."""
    command = shutil.which("py-spy")
    if command is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own py-spy, with a number
            [command, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_WITHIN, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _by_signal(snapshot: RankSnapshot) -> str:
    number, answer_path = _asked_by(snapshot)
    try:
        descriptor = os.open(answer_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NoStacksError(f"{answer_path}: {error.strerror}; run this as the job's user") from error
    try:
        before = os.fstat(descriptor).st_size
        if not catches(snapshot.lock_pid, number):
            raise NoStacksError(f"its process no longer handles signal {number}")
        os.kill(snapshot.lock_pid, number)
        return _answer(descriptor, before)
    except OSError as error:
        raise NoStacksError(error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _asked_by(snapshot: RankSnapshot) -> tuple[int, Path]:
    """The signal, and where the answer will be. Raises NoStacksError unless both are what only the hook makes."""
    dump = snapshot.info.get("stacks") or {}
    number, descriptor = (dump.get(name) for name in ("signal", "descriptor")) if isinstance(dump, dict) else (0, 0)
    # Whatever a record says, nothing is ever sent but a real-time signal.
    if not (isinstance(number, int) and signal.SIGRTMIN <= number <= signal.SIGRTMAX and isinstance(descriptor, int)):
        raise NoStacksError("its hook has no signal for them; install py-spy")
    path = Path(f"/proc/{snapshot.lock_pid}/fd/{descriptor}")
    try:
        target = str(path.readlink())
    except OSError as error:
        raise NoStacksError(f"{path}: {error.strerror}; run this as the job's user") from error
    if not target.startswith(f"/memfd:{MEMORY_FILE}"):
        raise NoStacksError("its process no longer has the file for them")
    return number, path


def catches(pid: int, number: int) -> bool:
    """Whether the process handles the signal now, by /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _answer(descriptor: int, before: int) -> str:
    """What is written after `before` bytes, once nothing more comes. Raises NoStacksError if nothing does."""
    size, changed, began = before, time.monotonic(), time.monotonic()
    while size == before or time.monotonic() - changed < COMPLETE_AFTER:
        if time.monotonic() - began > ANSWER_WITHIN:
            raise NoStacksError(f"no answer within {ANSWER_WITHIN:.0f} s: the process is stopped, or blocks the signal")
        time.sleep(LOOK_EVERY)
        now = os.fstat(descriptor).st_size
        if now != size:
            size, changed = now, time.monotonic()
    return os.pread(descriptor, size - before, before).decode(errors="replace")
