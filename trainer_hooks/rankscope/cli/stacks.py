"""The command `rankscope stacks`: where every thread of every living rank of this machine is in its Python code.

By py-spy where it is installed and may look, else by the hook's own answer to a signal (stack_dump.py). That signal
kills a process that has no handler for it, so three things are made sure of before it is sent: that the process holds
the lock of the record and is of the record's owner (lock_holder.py), that it has the file for the answer, and that it
catches the signal now. Root asks other users' processes, which may be hostile: all that they say is bounded, and
printed as printable text.
"""

from __future__ import annotations

import os
import pwd
import signal
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from rankscope.cli.living_ranks import RecordedRank, RunDirectoryError, living_ranks
from rankscope.cli.lock_holder import NotTheRankError, Process, process_of
from rankscope.cli.printable import printable
from rankscope.cli.py_spy import stacks_by_py_spy
from rankscope.process.ending import catches
from rankscope.process.stack_dump import MEMORY_FILE
from rankscope.record.listing import take_turns
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, SYSTEM_RUN_DIR

ANSWER_WITHIN = 5.0  # seconds; a stopped process does not answer
COMPLETE_AFTER = 0.1  # seconds without a further line; a dump takes a millisecond
LOOK_EVERY = 0.01
ANSWER_LIMIT = 1024**2  # bytes; a hundred threads, the most that faulthandler writes, are a tenth of it
RANKS_LIMIT = 256  # asked, as many as the exporter shows
OWNER_WITHIN = 120.0  # seconds that the ranks of one user may take: nobody holds up the answer about all others
NAME_LIMIT = 200  # characters, as of a label
LARGEST_DESCRIPTOR = 2**31
NAMED = 8  # ranks, where none is as it was asked for


class NoStacksError(Exception):
    """Why a rank's stacks cannot be had."""


def show(run: str | None, rank: str | None, directory: Path | None, out: TextIO = sys.stdout) -> int:
    """Print the stacks of the living ranks that are asked for. The exit status: 1 if one does not answer, 2 if none is.

    `directory` None is where ranks leave their records by default. Root asks everybody's ranks, others their own.
    """
    directories = _directories(directory)
    living = _living(directories)
    wanted = [one for one in living if _is_wanted(one, run, rank)]
    mine = [one for one in wanted if _may_ask(one)]
    if not mine:
        others = f"; {len(wanted)} of other users: run this as the job's user" if wanted else _there(living)
        asked = ("" if rank is None else f" {rank}") + ("" if run is None else f" of run {run}")
        _complain(f"no living rank{asked} in {', '.join(map(str, directories))}{others}")
        return 2
    if len(mine) > RANKS_LIMIT:
        _complain(f"{len(mine)} ranks, of which {RANKS_LIMIT} are asked; choose with --run and --rank")
    return _show(sorted(take_turns(mine)[:RANKS_LIMIT], key=_order), out)


def _show(ranks: Iterable[RecordedRank], out: TextIO) -> int:
    spent: Counter[int] = Counter()  # milliseconds by owner
    status = 0
    for one in ranks:
        began = time.monotonic()
        try:
            if spent[one.owner] > 1000 * OWNER_WITHIN:
                raise NoStacksError(f"not asked: other ranks of its user took {OWNER_WITHIN:.0f} s")
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


def _complain(what: str) -> None:
    print(f"rankscope stacks: {printable(what)}", file=sys.stderr)  # noqa: T201 - a command


def _there(living: Iterable[RecordedRank]) -> str:
    """Which ranks there are that may be asked."""
    infos = [one.snapshot.info for one in living if _may_ask(one)]
    names = [f"{info.get('run')} rank {info.get('rank')}" for info in infos]
    return f"; there are: {', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)}" if names else ""


def heading(snapshot: RankSnapshot) -> str:
    """Who it is, and what it has been doing for how long."""
    info = snapshot.info
    since = snapshot.read_monotonic - snapshot.phase_since
    pid = snapshot.lock_pid or info.get("pid")
    run, rank, number, phase = (
        printable(str(one), NAME_LIMIT) for one in (info.get("run"), info.get("rank"), pid, snapshot.phase)
    )
    return (
        f"=== run {run}, rank {rank}, pid {number}: {phase} for {since:.1f} s, "
        f"step {snapshot['steps']:.0f}{_collective(snapshot)}"
    )


def _user(owner: int) -> str:
    """Whose it is, where that is not who asks: a run's name is anybody's."""
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
    where = f" with {printable(group, NAME_LIMIT)}, number {snapshot.issued[group]:.0f}" if group else ""
    return f", in {snapshot.open_operation}{where}"


def stacks(rank: RecordedRank) -> str:
    """The stacks of all threads. Raises NoStacksError."""
    pid = rank.snapshot.lock_pid
    if not pid:
        raise NoStacksError("its process cannot be seen from here, as it is in another container")
    try:
        with process_of(rank.snapshot.path, pid, rank.owner) as process:
            said = stacks_by_py_spy(pid, ANSWER_LIMIT) or _by_signal(rank, process)
    except NotTheRankError as error:
        raise NoStacksError(str(error)) from error
    is_whole = len(said.encode(errors="replace")) < ANSWER_LIMIT
    return said if is_whole else f"{said}\n(cut off after {ANSWER_LIMIT} bytes)"


def _directories(directory: Path | None) -> Sequence[Path]:
    if directory or os.environ.get("RANKSCOPE_RUN_DIR"):
        return [directory or Path(os.environ["RANKSCOPE_RUN_DIR"])]
    return [SYSTEM_RUN_DIR, SHARED_MEMORY_RUN_DIR]


def _living(directories: Iterable[Path]) -> list[RecordedRank]:
    return sorted((one for directory in directories for one in _living_in(directory)), key=_order)


def _living_in(directory: Path) -> list[RecordedRank]:
    try:
        return living_ranks(directory)
    except RunDirectoryError as error:
        _complain(str(error))
        return []


def _order(one: RecordedRank) -> tuple[str, int, int]:
    return one.run, int(one.rank), one.owner


def _is_wanted(one: RecordedRank, run: str | None, rank: str | None) -> bool:
    return run in (None, one.run) and rank in (None, one.rank)


def _by_signal(rank: RecordedRank, process: Process) -> str:
    number, answer_path = _asked_by(rank.snapshot)
    try:
        descriptor = _opened(answer_path, rank.owner)
    except OSError as error:
        raise NoStacksError(f"{answer_path}: {error.strerror}; run this as the job's user") from error
    try:
        before = os.fstat(descriptor).st_size
        if not catches(process.pid, number):
            raise NoStacksError(f"its process no longer handles signal {number}")
        process.still()
        process.send(number)
        return _answer(descriptor, before)
    except OSError as error:
        raise NoStacksError(error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _opened(path: Path, owner: int) -> int:
    """The file for the answer, if it is one in memory and the rank's: nothing of a device, pipe or mount is opened."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_uid != owner:
            raise NoStacksError("its process no longer has the file for them")
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)


def _asked_by(snapshot: RankSnapshot) -> tuple[int, Path]:
    """The signal, and where the answer will be. Raises NoStacksError unless both are what only the hook makes."""
    dump = snapshot.info.get("stacks")
    asked: dict[str, Any] = dump if isinstance(dump, dict) else {}
    number, descriptor = asked.get("signal"), asked.get("descriptor")
    # Whatever a record says, nothing is ever sent but a real-time signal.
    if not (_is_within(number, signal.SIGRTMIN, signal.SIGRTMAX) and _is_within(descriptor, 0, LARGEST_DESCRIPTOR)):
        raise NoStacksError("its hook has no signal for them; install py-spy")
    path = Path(f"/proc/{snapshot.lock_pid}/fd/{descriptor}")
    try:
        target = str(path.readlink())
    except OSError as error:
        raise NoStacksError(f"{path}: {error.strerror}; run this as the job's user") from error
    if not target.startswith(f"/memfd:{MEMORY_FILE}"):
        raise NoStacksError("its process no longer has the file for them")
    return number, path


def _is_within(number: object, least: int, largest: int) -> TypeGuard[int]:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= largest


def _answer(descriptor: int, before: int) -> str:
    """What is written after `before` bytes, once nothing more comes. Raises NoStacksError if nothing does."""
    size, changed, began = before, time.monotonic(), time.monotonic()
    while size <= before or (size < before + ANSWER_LIMIT and time.monotonic() - changed < COMPLETE_AFTER):
        if time.monotonic() - began > ANSWER_WITHIN:
            if size > before:
                break  # it writes on and on; this much is the answer
            raise NoStacksError(f"no answer within {ANSWER_WITHIN:.0f} s: the process is stopped, or blocks the signal")
        time.sleep(LOOK_EVERY)
        now = os.fstat(descriptor).st_size
        if now != size:
            size, changed = now, time.monotonic()
    return os.pread(descriptor, min(size - before, ANSWER_LIMIT), before).decode(errors="replace")
