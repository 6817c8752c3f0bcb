"""The positions of a run's ranks on this machine, from their records, and the place of torch's dumps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rankscope.cli.living_ranks import RecordedRank, RunDirectoryError, living_ranks
from rankscope.record.group_name import members
from rankscope_exporter.diagnosis.waits import Operation, Position
from rankscope_exporter.hangs.flight_recorder import Group
from rankscope_exporter.hangs.words import lines

PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"


class NoRanksError(Exception):
    """No rank can be shown. The message names the reason."""


def explain_records(run: str | None, run_dirs: Sequence[Path]) -> Iterator[str]:
    """Yield the ranks that block the run. Raise NoRanksError."""
    living = _living(run, run_dirs)
    groups = {
        name: Group(name, "", ranks) for one in living for name in one.snapshot.groups if (ranks := members(name))
    }
    yield from lines([_position(one) for one in living], groups)
    yield from _dumps(living[0])


def _living(run: str | None, run_dirs: Sequence[Path]) -> list[RecordedRank]:
    try:
        every = [one for directory in run_dirs for one in living_ranks(directory)]
    except RunDirectoryError as error:
        raise NoRanksError(str(error)) from error
    runs = sorted({one.run for one in every})
    if run is None and len(runs) > 1:
        raise NoRanksError(f"several runs found; choose one with --run: {', '.join(runs)}")
    found = [one for one in every if run in (None, one.run)]
    if not found:
        raise NoRanksError(
            f"no living rank{'' if run is None else f' of run {run}'} in {', '.join(map(str, run_dirs))}"
        )
    if len({one.owner for one in found}) > 1:  # another user's run with the same name must not be mixed in
        found = [one for one in found if one.owner == os.geteuid()]
    if not found:
        raise NoRanksError(f"several users have a run {run}; run this command as the job's user")
    return sorted(found, key=lambda one: int(one.rank))


def _position(one: RecordedRank) -> Position:
    counts, group = one.snapshot.issued, one.snapshot.open_group
    if group not in counts:
        return Position(int(one.rank), counts)
    return Position(int(one.rank), counts, waits_in=Operation(one.snapshot.open_operation, group, counts[group]))


def _dumps(one: RecordedRank) -> Iterator[str]:
    """Yield where torch writes dumps of its flight recorder, if the job's environment can be read."""
    with suppress(OSError):
        pairs = Path(f"/proc/{one.snapshot.lock_pid}/environ").read_bytes().decode(errors="replace").split("\0")
        environment = dict(pair.partition("=")[::2] for pair in pairs)
        yield from describe_dumps(environment)


def describe_dumps(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the dumps that a job with this environment writes."""
    prefix = next((environment[name] for name in PREFIXES if environment.get(name)), "")
    if prefix:
        when = "when NCCL's watchdog times out" if environment.get(ON_TIMEOUT, "1") != "0" else "on request"
        yield f"torch writes a dump of each rank to {prefix}RANK {when}. Then run: rankscope hang {prefix}"
    if pipe := environment.get(PIPE):
        yield f"To dump a rank now: echo 1 > {pipe}RANK.pipe"
    if not prefix and not pipe:
        yield f"torch writes no flight recorder dumps. To get them, set {PREFIXES[0]} before the next start."
