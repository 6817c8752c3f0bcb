"""Jobs from the records in a run directory: measured by the ranks' own clocks, without GPUs or findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rankscope.cli.living_ranks import RecordedRank, RunDirectoryError, all_ranks
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.diagnosis.lost import by_cause
from rankscope_exporter.job_report.job import Job, NoJobError, check_directory


def jobs(directory: Path) -> list[Job]:
    """Return all jobs that have a record in the directory. Raise NoJobError."""
    check_directory(directory)
    ranks: dict[tuple[str, str], list[RecordedRank]] = defaultdict(list)
    try:
        for rank in all_ranks(directory):
            ranks[rank.run, str(rank.owner)].append(rank)
    except RunDirectoryError as error:
        raise NoJobError(str(error)) from error
    return [_job(run, owner, members) for (run, owner), members in ranks.items()]


def _job(run: str, owner: str, ranks: list[RecordedRank]) -> Job:
    causes: dict[str, float] = defaultdict(float)
    snapshots = [rank.snapshot for rank in ranks]
    # Each rank has its own clocks: a shared directory has records of several nodes, or of several boots.
    ends = [end(one) for one in snapshots]
    for one in snapshots:
        for cause, seconds in by_cause(phase_seconds(one)).items():
            causes[cause] += seconds
    return Job(
        runs=[run],
        owner=owner,
        slurm=snapshots[0].info.get("slurm", {}),
        nodes=sorted({str(one.info.get("node", "")) for one in snapshots}),
        ranks=len({rank.rank for rank in ranks}),
        steps=max(one["steps"] for one in snapshots),
        began=min(one.unix_field("started_unix") for one in snapshots),
        ended=None if any(one.alive for one in snapshots) else max(ends),
        at=max(map(last_known, snapshots)),
        causes=causes,
    )


def end(one: RankSnapshot) -> float:
    """Return the unix time of a rank's end, or of its last progress if that is unknown."""
    return one.exit_unix or one.unix(one.last_progress)


def last_known(one: RankSnapshot) -> float:
    """Return the unix time until which a rank is known: now if it is alive."""
    return one.unix(one.read_monotonic) if one.alive else end(one)


def phase_seconds(one: RankSnapshot) -> Mapping[str, float]:
    """Return a rank's seconds by phase. If it has ended, its open phase lasted until then."""
    phases = dict(one.phase_seconds)
    if not one.alive:
        phases[one.phase] += max(end(one) - one.unix_field("started_unix") - sum(phases.values()), 0.0)
    return phases
