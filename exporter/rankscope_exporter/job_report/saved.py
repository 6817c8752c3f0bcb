"""Jobs from the saved state and journal of this node's exporter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankscope_exporter.job_report.job import Gpu, Job, JobFinding, NoJobError, check_directory
from rankscope_exporter.ranks import journal
from rankscope_exporter.ranks.state_file import NAME, StateFile

OTHERWISE = ": give the exporter's --state-dir, as a user who may read it, or a Prometheus with --url"
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


def jobs(directory: Path) -> list[Job]:
    """Return all known jobs, each once. Raise NoJobError."""
    check_directory(directory, OTHERWISE)
    state = directory / NAME
    try:
        entries = [*journal.read(directory)]
        if state.exists():
            state.open("rb").close()
    except OSError as error:
        raise NoJobError(f"{error.filename}: {error.strerror}{OTHERWISE}") from error
    saved = StateFile(directory).load().get("accounts", ())
    accounts = [*_select_entries(entries, journal.FINISHED), *(saved if isinstance(saved, list) else ())]
    found = [*_select_entries(entries, journal.FOUND)]
    known: dict[tuple[str, str, float], Job] = {}
    for account in accounts:
        with suppress(*UNREADABLE):
            job = _job(account, found)
            key = job.runs[0], job.owner, float(account["began"])
            known[key] = max(known.get(key, job), job, key=lambda one: one.at)
    return [*known.values()]


def _select_entries(entries: Iterable[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (entry for entry in entries if entry.get("entry") == kind)


def _job(account: Mapping[str, Any], found: list[Mapping[str, Any]]) -> Job:
    run, owner = str(account["run"]), str(account["owner"])
    step = float(account.get("clock_step", 0.0))
    began = float(account["began"]) + step
    at, ended = float(account["at"]), account["ended"] and float(account["ended"])
    first, last = began - max(step, 0.0) - 1.0, at - min(step, 0.0)  # findings may be older than the clock's step
    own = [
        one
        for one in found
        if (one["run"], one["owner"]) == (run, owner) and first <= one["end"] and one["begin"] <= last
    ]
    ranks = account["ranks"].values()
    return Job(
        runs=[run],
        owner=owner,
        user=str(account["user"]),
        slurm={str(name): str(text) for name, text in account["slurm"].items()},
        nodes=[*map(str, account["nodes"])],
        ranks=int(account["rank_count"]),
        world_size=int(account["world_size"]),
        steps=float(account["steps"]),
        began=began,
        ended=ended,
        at=at,
        causes=_causes(account),
        gpus=sorted(map(_gpu, account["gpus"].values()), key=lambda gpu: (gpu.node, gpu.index.zfill(4))),
        cpu_seconds=sum((float(use["cpu"]) + float(use["cpu_before"]) for use in ranks), float(account["cpu_gone"]))
        or None,
        cpus=int(account["cpus"]) or None,
        memory=float(account["memory"]) or None,
        findings=[*_findings([*own, *account["findings"].values()])],
    )


def _causes(account: Mapping[str, Any]) -> dict[str, float]:
    """Return the GPU seconds by cause until the state was saved."""
    causes = {str(cause): float(seconds) for cause, seconds in account["causes"].items()}
    for cause, seconds in account.get("pending", {}).items():
        causes[cause] = causes.get(cause, 0.0) + float(seconds)
    return causes


def _gpu(use: Mapping[str, Any]) -> Gpu:
    seconds, busy = float(use["seconds"]), use["busy"]
    return Gpu(
        node=str(use["node"]),
        index=str(use["index"]),
        busy_ratio=min(busy / seconds, 1.0) if busy is not None and seconds else None,
        memory=use["memory"],
        memory_total=use["memory_total"],
        joules=use["joules"],
    )


def _findings(entries: list[Mapping[str, Any]]) -> Iterator[JobFinding]:
    """Yield each finding once. A finding that was explained by another for a while has several entries."""
    latest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for entry in entries:
        latest[entry["kind"], entry["rank"], round(entry["begin"], -1)] = entry
    for entry in sorted(latest.values(), key=lambda one: float(one["begin"])):
        yield JobFinding(
            begin=float(entry["begin"]),
            end=float(entry["end"]) if "end" in entry else None,
            kind=str(entry["kind"]),
            severity=str(entry["severity"]),
            ratio=float(entry["ratio"]),
            sentence=str(entry["sentence"]),
            advice=str(entry["advice"]),
            mean=float(entry["mean"]) if "mean" in entry else None,
        )
