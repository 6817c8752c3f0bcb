"""Jobs from the saved state and journal of this node's exporter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankscope.cli.explaining.answers import LARGEST
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope_exporter.diagnosis.lost import by_cause
from rankscope_exporter.diagnosis.priority import STANDSTILLS
from rankscope_exporter.job_report.job import Gpu, Job, JobFinding, NoJobError, check_directory, merge_trainings
from rankscope_exporter.job_report.records import last_known, phase_seconds
from rankscope_exporter.ledger import journal, state_file

OTHERWISE = ": give the exporter's --state-dir, as a user who may read it, or a Prometheus with --url"
CAPTURED_WITHIN = 600.0
"""Seconds after a run's end in which a crash was captured."""
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def jobs(directory: Path) -> list[Job]:
    """Return all known jobs, each once. Raise NoJobError."""
    check_directory(directory, OTHERWISE)
    try:
        entries = [*journal.read(directory)]
        states = [*state_file.read(directory)]
    except OSError as error:
        raise NoJobError(f"{error.filename}: {error.strerror}{OTHERWISE}") from error
    accounts = [*_select_entries(entries, journal.FINISHED), *(one["account"] for one in states if "account" in one)]
    found = [*_select_entries(entries, journal.FOUND)]
    captured = [*_select_entries(entries, journal.CAPTURED)]
    known: dict[tuple[str, str, str, float], Job] = {}
    for account in accounts:
        with suppress(*UNREADABLE):
            job = _job(_until_now(account), found, captured)
            key = job.runs[0], job.owner, str(account.get("training", "")), float(account["began"])
            # The clock may have been set back before the run's end.
            known[key] = max(known.get(key, job), job, key=lambda one: (one.ended is not None, one.at))
    return merge_trainings([*known.values()])


def _select_entries(entries: Iterable[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (entry for entry in entries if entry.get("entry") == kind)


def _job(account: Mapping[str, Any], found: Sequence[Mapping[str, Any]], captured: Sequence[Mapping[str, Any]]) -> Job:
    run, owner, training = str(account["run"]), str(account["owner"]), account.get("training", "")
    step = _number(account.get("clock_step", 0.0))
    began = _number(account["began"]) + step
    at, ended = _number(account["at"]), account["ended"] and _number(account["ended"])
    first, last = began - max(step, 0.0) - 1.0, at - min(step, 0.0)  # findings may be older than the clock's step
    found, captured = (
        [
            one
            for one in entries
            if (one.get("run"), one.get("owner"), one.get("training", "")) == (run, owner, training)
        ]
        for entries in (found, captured)
    )
    own = [one for one in found if first <= one["end"] and one["begin"] <= last]
    ranks = account["ranks"].values()
    return Job(
        runs=[run],
        owner=owner,
        user=str(account["user"]),
        slurm={str(name): str(text) for name, text in account["slurm"].items()},
        nodes=[*map(str, account["nodes"])],
        ranks=int(_number(account["rank_count"])),
        world_size=int(_number(account["world_size"])),
        steps=_number(account["steps"]),
        began=began,
        ended=ended,
        at=at,
        causes=_add(account["causes"], account.get("pending", {})),
        gpus=sorted(map(_gpu, account["gpus"].values()), key=lambda gpu: (gpu.node, gpu.index.zfill(4))),
        cpu_seconds=sum(
            (_number(use["cpu"]) + _number(use["cpu_before"]) for use in ranks), _number(account["cpu_gone"])
        )
        or None,
        cpus=int(_number(account["cpus"])) or None,
        memory=_number(account["memory"]) or None,
        findings=[*_findings([*own, *account["findings"].values()], ended)],
        captures=[str(one["path"]) for one in captured if first <= _number(one["at"]) <= last + CAPTURED_WITHIN],
    )


def _until_now(account: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the saved account of a running job, continued until now from the records of its ranks.

    It is unchanged if not all of them can be read. If the run hangs, the time since the last progress is stall.
    """
    ranks = account["ranks"]
    if account["ended"]:
        return account
    try:
        snapshots = {rank: read_rank(Path(use.get("record", ""))) for rank, use in ranks.items()}
    except (OSError, UnreadableRecordError):
        return account
    alive = [one for one in snapshots.values() if one.alive]
    if not alive or any(one["started_monotonic"] != ranks[rank]["began"] for rank, one in snapshots.items()):
        return account
    at = max(map(last_known, alive))
    is_hung = any(entry["kind"] in STANDSTILLS for entry in account["findings"].values())
    stalled = min(one.read_monotonic - one.last_progress for one in alive) if is_hung else 0.0
    pending = {"idle": max(at - account["at"], 0.0) * (len(snapshots) - len(alive))}
    for rank, one in snapshots.items():
        divided = ranks[rank]["divided"]
        spent = {name: max(now - divided.get(name, 0.0), 0.0) for name, now in phase_seconds(one).items()}
        pending = _add(pending, by_cause(spent, stalled))
    return {**account, "pending": pending, "at": at, "steps": max(one["steps"] for one in snapshots.values())}


def _add(causes: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two accounts of GPU seconds by cause."""
    return {str(cause): _number(causes.get(cause, 0.0)) + _number(more.get(cause, 0.0)) for cause in {**causes, **more}}


def _gpu(use: Mapping[str, Any]) -> Gpu:
    names = ("busy", "memory", "memory_total", "joules")
    busy, *others = (None if use[name] is None else _number(use[name]) for name in names)
    seconds = _number(use["seconds"])
    busy_ratio = min(busy / seconds, 1.0) if busy is not None and seconds else None
    return Gpu(str(use["node"]), str(use["index"]), busy_ratio, *others)


def _number(value: Any) -> float:
    """Return a number of a job. Raise TypeError, or ValueError or OverflowError for one that no job has."""
    number = float(value)
    if not abs(number) <= LARGEST:  # true for NaN
        raise ValueError(f"{number} is too large")
    return number


def _findings(entries: list[Mapping[str, Any]], ended: float | None) -> Iterator[JobFinding]:
    """Yield each finding once, until the run's end. One that another explained for a while has several entries."""
    latest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for entry in entries:
        latest[entry["kind"], entry["cause"], entry["rank"], round(entry["begin"], -1)] = entry
    for entry in sorted(latest.values(), key=lambda one: _number(one["begin"])):
        begin, ends = _number(entry["begin"]), [_number(entry["end"])] if "end" in entry else []
        ends += [] if ended is None else [max(ended, begin)]
        yield JobFinding(
            begin=begin,
            end=min(ends, default=None),
            kind=str(entry["kind"]),
            severity=str(entry["severity"]),
            ratio=_number(entry["ratio"]),
            sentence=str(entry["sentence"]),
            advice=str(entry["advice"]),
            mean=_number(entry["mean"]) if "mean" in entry else None,
        )
