"""The command `rankscope stacks`: it groups the living ranks on this machine by their Python stacks."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rankscope.cli.living_ranks import RecordedRank, RunDirectoryError, all_ranks
from rankscope.cli.printable import printable
from rankscope.cli.rank_stacks import ask_all, may_ask, read_rank_stacks
from rankscope.cli.stacks_page import NAME_LIMIT, lines
from rankscope.record.group_name import members
from rankscope.record.listing import take_turns
from rankscope.record.writer import default_run_dirs

RANKS_LIMIT = 256  # as in the exporter
NAMED = 8  # ranks listed if none matches


def show(run: str | None, rank: str | None, directory: Path | None, out: TextIO = sys.stdout) -> int:
    """Print the stacks of the selected ranks. Returns the exit status: 1 if a rank does not answer, 2 if there is none.

    `directory` None means the default run directories. Root gets the ranks of all users, other users their own.
    """
    directories = [directory] if directory else default_run_dirs()
    every = ranks_in(directories)
    living = [one for one in every if one.snapshot.alive]
    wanted = [one for one in living if is_wanted(one.run, int(one.rank), run, rank)]
    permitted = [one for one in wanted if may_ask(one)]
    if not permitted:
        others = f"; {len(wanted)} of other users: run this as the job's user" if wanted else _available(living)
        selection = ("" if rank is None else f" {rank}") + ("" if run is None else f" of run {run}")
        _warn(f"no living rank{selection} in {', '.join(map(str, directories))}{others}")
        return 2
    if len(permitted) > RANKS_LIMIT:
        _warn(f"{len(permitted)} ranks, showing only {RANKS_LIMIT}; select with --run and --rank")
    found = [*ask_all(sorted(take_turns(permitted)[:RANKS_LIMIT], key=_order))]
    found += [
        read_rank_stacks(one, "", f"it has ended ({one.snapshot.exit_reason or 'unknown'})")
        for one in _ended(every, permitted)
        if is_wanted(one.run, int(one.rank), run, rank)
    ]
    out.writelines(f"{line}\n" for line in lines(found, _other_user))
    return 1 if any(one.reason for one in found) else 0


def is_wanted(run: str, rank: int, wanted_run: str | None, wanted_ranks: str | None) -> bool:
    """Return whether the command's selection includes a rank of a run."""
    return wanted_run in (None, run) and (wanted_ranks in (None, str(rank)) or rank in members(wanted_ranks or ""))


def ranks_in(directories: Iterable[Path]) -> list[RecordedRank]:
    """Return the ranks of all directories. Warn about those that cannot be read."""
    return sorted((one for directory in directories for one in _ranks_in(directory)), key=_order)


def _ended(every: Iterable[RecordedRank], living: Sequence[RecordedRank]) -> Iterator[RecordedRank]:
    """Yield the ranks of the same trainings that have ended since the living ones began: others may wait for them."""
    began: dict[tuple[str, int], float] = {}
    for one in living:
        key = one.run, one.owner
        began[key] = min(one.snapshot["started_monotonic"], began.get(key, float("inf")))
    alive = {(one.run, one.owner, one.rank) for one in living}
    for one in every:
        is_of_training = one.snapshot.last_progress >= began.get((one.run, one.owner), float("inf"))
        is_of_boot = one.snapshot.unix_offset is not None
        if is_of_training and is_of_boot and not one.snapshot.alive and (one.run, one.owner, one.rank) not in alive:
            yield one


def _ranks_in(directory: Path) -> list[RecordedRank]:
    try:
        return all_ranks(directory)
    except RunDirectoryError as error:
        _warn(str(error))
        return []


def _order(one: RecordedRank) -> tuple[str, int, int]:
    return one.run, int(one.rank), one.owner


def _available(living: Iterable[RecordedRank]) -> str:
    """Return a list of the ranks that this user may ask, as the end of a message."""
    infos = [one.snapshot.info for one in living if may_ask(one)]
    names = [f"{info.get('run')} rank {info.get('rank')}" for info in infos]
    return f"; available: {', '.join(names[:NAMED])}{', ...' * (len(names) > NAMED)}" if names else ""


def _other_user(owner: int) -> str:
    """Return the owner's name, if it is another user: any user can choose the name of a run."""
    if owner == os.geteuid():
        return ""
    try:
        return printable(pwd.getpwuid(owner).pw_name, NAME_LIMIT)
    except KeyError:
        return str(owner)


def _warn(text: str) -> None:
    print(f"rankscope stacks: {printable(text)}", file=sys.stderr)  # noqa: T201 - a command
