"""The positions of a run's ranks on this machine, from their records, and the place of torch's dumps."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rankscope.cli.living_ranks import RecordedRank, RunDirectoryError, all_ranks
from rankscope.record import layout
from rankscope.record.group_name import members, name_ranks
from rankscope.record.process_stat import read_environment
from rankscope.record.stopped import is_stopped
from rankscope.record.text import NUMBER
from rankscope_exporter.diagnosis.waits import (
    Operation,
    Position,
    blocking_ranks,
    unfinished_group,
    waits,
    with_unused_groups,
)
from rankscope_exporter.hangs.flight_recorder import Group
from rankscope_exporter.hangs.words import UNKNOWN, Coverage, lines

HANGS_AFTER = 5.0
"""Seconds without progress; few steps take longer."""
DEVICE_MAY_WORK = ("collective_wait", "device_wait", "other")
"""Phases of a rank whose host waits for the device, or is at a place that no probe knows."""
GLOO = "gloo"
"""The backend whose collectives the host waits in."""
PAIRWISE = ("send", "recv")
"""Operations of two ranks. A record does not count them, and does not name the other rank."""
ELSEWHERE = ("it runs on another node or has ended", "they run on another node or have ended")
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
OLD_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's
NO = ("0", "n", "no", "f", "false")
"""The values by which torch switches a setting off, in any case."""


class NoRanksError(Exception):
    """No rank can be shown. The message names the reason."""


def explain_records(run: str | None, run_dirs: Sequence[Path]) -> Iterator[str]:
    """Yield the ranks that block the run. Raise NoRanksError."""
    living, ended = read_run(run, run_dirs)
    yield from explain_ranks(living, ended, "Run this command on each node of the run.")
    yield from _dumps(living[0])


def explain_ranks(living: Sequence[RecordedRank], ended: Mapping[int, str], advice: str) -> Iterator[str]:
    """Yield the ranks that block a run, from its living ranks and the ends of others.

    `advice` says how to see ranks on other nodes.
    """
    ranks_of = ranks_of_groups(living)
    groups = {name: Group(name, "", ranks) for name, ranks in ranks_of.items()}
    positions = find_positions(living, ranks_of)
    coverage = Coverage(_world_size(living), ended, ELSEWHERE, advice)
    yield from lines(positions, groups, coverage)
    if stopped := [int(one.rank) for one in living if is_stopped(one.snapshot.lock_pid)]:
        are = "are" if len(stopped) > 1 else "is"
        yield f"{name_ranks(stopped)} {are} stopped: by a signal (SIGSTOP), a debugger or a frozen cgroup."
    late = frozenset[int]().union(*blocking_ranks(waits(positions, ranks_of)))
    if coverage.world_size > len(living) + len(ended) and (unsure := [*_on_device(living, late)]):
        yield f"On the device, {name_ranks(unsure).lower()} may wait for a rank that is not visible here."
    if not late & ({one.rank for one in positions} | ended.keys()):
        yield f"Phases: {'; '.join(_phases(living))}."
    if (idle := min(one.snapshot.read_monotonic - one.snapshot.last_progress for one in living)) < HANGS_AFTER:
        yield f"The run may not hang: a rank has made progress {idle:.1f} s ago."


def _on_device(living: Sequence[RecordedRank], late: Set[int]) -> Iterator[int]:
    """Yield the late ranks of which only the host is known to be in no collective: it may wait for the device."""
    for one in living:
        is_host = one.snapshot.info.get("backend") == GLOO
        if int(one.rank) in late and not is_host and one.snapshot.phase in DEVICE_MAY_WORK:
            yield int(one.rank)


def ranks_of_groups(living: Sequence[RecordedRank]) -> Mapping[str, Sequence[int]]:
    """Return the ranks of each group by its name; if that was cut off, those that use it."""
    using: dict[str, list[int]] = defaultdict(list)
    for one in living:
        for name in one.snapshot.groups:
            using[name].append(int(one.rank))
    return {name: members(name) or ranks for name, ranks in using.items()}


def _phases(living: Sequence[RecordedRank]) -> Iterator[str]:
    """Yield each phase with its ranks, the one with the fewest ranks first: the others may wait for these."""
    by_phase: dict[str, list[int]] = defaultdict(list)
    for one in living:
        by_phase[one.snapshot.phase].append(int(one.rank))
    for phase, ranks in sorted(by_phase.items(), key=lambda item: (len(item[1]), item[0])):
        yield f"{name_ranks(ranks).lower()} in {phase}"


def find_positions(living: Sequence[RecordedRank], groups: Mapping[str, Sequence[int]]) -> Sequence[Position]:
    """Return the ranks' positions.

    With CUDA and NCCL the host does not wait in a collective. If no rank in a collective waits for another one, a rank
    that may wait for its device is in a collective that another rank has not issued.
    """
    issued = with_unused_groups({int(one.rank): one.snapshot.issued for one in living})
    positions = [_position(one, issued[int(one.rank)]) for one in living]
    for phases in ((), DEVICE_MAY_WORK, layout.PHASES):
        assumed = [
            replace(position, waits_in=position.waits_in or _unfinished(position, issued))
            if one.snapshot.phase in phases
            else position
            for one, position in zip(living, positions, strict=True)
        ]
        if blocking_ranks(waits(assumed, groups)):
            return assumed
    return positions


def _unfinished(one: Position, issued: Mapping[int, Mapping[str, float]]) -> Operation | None:
    group = unfinished_group(one.rank, issued)
    return None if group is None else Operation(UNKNOWN, group, one.issued[group])


def read_run(run: str | None, run_dirs: Sequence[Path]) -> tuple[list[RecordedRank], Mapping[int, str]]:
    """Return a run's living ranks of one owner, and the ends of those that have ended since. Raise NoRanksError."""
    try:
        every = [one for directory in run_dirs for one in all_ranks(directory)]
    except RunDirectoryError as error:
        raise NoRanksError(str(error)) from error
    living = _living(run, every, run_dirs)
    known = {one.rank for one in living}
    began = min(one.snapshot["started_monotonic"] for one in living)
    ended = {
        int(one.rank): one.snapshot.exit_reason or "unknown"
        for one in every
        if (one.run, one.owner) == (living[0].run, living[0].owner)
        and one.rank not in known
        and one.snapshot.unix_offset is not None  # else another boot's times
        and one.snapshot.last_progress >= began
    }
    return living, ended


def _living(run: str | None, every: Sequence[RecordedRank], run_dirs: Sequence[Path]) -> list[RecordedRank]:
    every, ended = [one for one in every if one.snapshot.alive], [one for one in every if not one.snapshot.alive]
    runs = sorted({one.run for one in every})
    if run is None and len(runs) > 1:
        raise NoRanksError(f"several runs found; choose one with --run: {', '.join(runs)}")
    found = [one for one in every if run in (None, one.run)]
    if not found:
        named = "" if run is None else f" of run {run}"
        raise NoRanksError(f"no living rank{named} in {', '.join(map(str, run_dirs))}{_ends(run, ended)}")
    if len({one.owner for one in found}) > 1:  # another user's run with the same name must not be mixed in
        found = [one for one in found if one.owner == os.geteuid()]
    if not found:
        raise NoRanksError(f"several users have a run {run}; run this command as the job's user")
    return sorted(found, key=lambda one: int(one.rank))


def _ends(run: str | None, ended: Sequence[RecordedRank]) -> str:
    """Return how the ranks of the caller's run have ended, as the end of a message; nothing if there are several."""
    own = [one for one in ended if run in (None, one.run) and os.geteuid() in (0, one.owner)]
    by_reason: dict[str, list[int]] = defaultdict(list)
    for one in own:
        by_reason[one.snapshot.exit_reason or "unknown"].append(int(one.rank))
    if len({one.run for one in own}) != 1 or len(own) > len({one.rank for one in own}):
        return ""
    ends = sorted(by_reason.items(), key=lambda item: (len(item[1]), item[1]))
    return f"; ended: {', '.join(f'{name_ranks(ranks).lower()} ({reason})' for reason, ranks in ends)}"


def _world_size(living: Sequence[RecordedRank]) -> int:
    """Return the run's number of ranks; 0 if the ranks disagree or do not know it."""
    sizes = {str(one.snapshot.info.get("world_size")) for one in living}
    size = sizes.pop()
    return int(size) if not sizes and NUMBER.fullmatch(size) else 0


def _position(one: RecordedRank, counts: Mapping[str, float]) -> Position:
    group, name = one.snapshot.open_group, one.snapshot.open_operation
    if group not in counts:
        return Position(int(one.rank), counts)
    operation = Operation(name, group, counts[group], is_pairwise=name in PAIRWISE)
    return Position(int(one.rank), counts, waits_in=operation)


def _dumps(one: RecordedRank) -> Iterator[str]:
    """Yield where torch writes dumps of its flight recorder, if the job's environment can be read."""
    if one.snapshot.info.get("backend") == GLOO:  # it has no watchdog
        return
    pid = one.snapshot.lock_pid
    with suppress(OSError):
        yield from describe_dumps(read_environment(pid), Path(f"/proc/{pid}/cwd").readlink())


def describe_dumps(environment: Mapping[str, str], directory: Path = Path()) -> Iterator[str]:
    """Yield the dumps that a job with this environment and working directory writes."""
    size = next((environment[name] for name in SIZES if environment.get(name)), "")
    if size == "0":
        yield f"torch writes no flight recorder dumps: {SIZES[0]} is 0."
        return
    when = "on request" if environment.get(ON_TIMEOUT, "1").lower() in NO else "when NCCL's watchdog times out"
    prefix, *others = dump_prefixes(environment, directory)
    if not others:
        yield f"torch writes a dump of each rank to {prefix}RANK {when}. Then run: rankscope hang {prefix}"
    else:
        older = f"to {OLD_DEFAULT}RANK" if size or environment.get(ON_TIMEOUT) else "none"
        yield f"torch writes a dump of each rank to {prefix}RANK {when}; before torch 2.7, {older}."
        yield f"Then run: rankscope hang {prefix}. To choose the place, set {PREFIXES[0]} before the next start."
    if pipe := environment.get(PIPE):
        yield f"To dump a rank now: echo 1 > {os.path.join(directory, pipe)}RANK.pipe"  # noqa: PTH118 - as above


def dump_prefixes(environment: Mapping[str, str], directory: Path) -> list[str]:
    """Return what torch may put before a rank's number: one prefix if a variable names it, else all defaults.

    The first default is that of DebugInfoWriter since torch 2.7.
    """
    if prefix := next((environment[name] for name in PREFIXES if environment.get(name)), ""):
        return [os.path.join(directory, prefix)]  # noqa: PTH118 - a Path drops a slash at the end
    cache = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '/tmp')}/.cache"  # noqa: S108 - as torch
    return [f"{cache}/torch/comm_lib_trace_rank_", OLD_DEFAULT]
