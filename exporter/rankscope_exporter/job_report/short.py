"""The job report as one short line of JSON for Slurm's AdminComment, which takes 1,024 bytes.

sacctmgr replaces quotation marks with backticks. The line has no other backticks, so `tr` restores the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from rankscope_exporter.job_report.job import Job
from rankscope_exporter.job_report.page import Prices

LIMIT = 1000
"""The longest line in bytes."""
REST, ROUNDING = "rest", 0.002
NAME_LIMIT, SHORT_NAME = 60, 10


def as_json(job: Job, prices: Prices) -> str:
    """Return the line. Leave out findings first, then the smallest causes, then ends of names, until it fits."""
    text = ""
    for line in _candidates(job, prices):
        text = json.dumps(line, separators=(",", ":")).replace("`", "'")
        if len(text) <= LIMIT:
            break
    return text


def _candidates(job: Job, prices: Prices) -> Iterator[dict[str, Any]]:
    for findings, causes in ((8, 24), (4, 16), (2, 8), (0, 8), (0, 4)):
        yield _line(job, prices, findings, causes)
    yield _line(job, prices, 0, 4, SHORT_NAME)  # 12 bytes for a character beyond Unicode's first 65,536


def _line(job: Job, prices: Prices, findings: int, causes: int, name_limit: int = NAME_LIMIT) -> dict[str, Any]:
    ratios = dict(job.ratios)
    useful = ratios.pop("none", 0.0)
    lost = {cause[:name_limit]: round(ratio, 4) for cause, ratio in [*ratios.items()][:causes] if round(ratio, 4)}
    rest = round((1.0 if job.ratios else 0.0) - round(useful, 4) - sum(lost.values()), 4)
    if rest:  # causes left out, or a rounding error, which is added to the largest
        name = REST if rest >= ROUNDING or not lost else next(iter(lost))
        lost[name] = round(lost.get(name, 0.0) + rest, 4)
    hours = job.gpu_seconds / 3600
    busy, memory = job.busy_ratios, job.memory_ratios
    line: dict[str, Any] = {
        "rankscope": 1,
        "job": job.slurm.get("job_id"),
        "run": job.runs[0][:name_limit],
        "ranks": job.ranks,
        "nodes": len(job.nodes),
        "seconds": round(job.seconds),
        "gpu_hours": _round(hours),
        "useful": round(useful, 4),
        "lost": lost,
        "gpu_busy": [round(value, 3) for value in (min(busy), fmean(busy), max(busy))] if busy else None,
        "gpu_memory": round(max(memory), 3) if memory else None,
        "cpus": None if job.cores is None else round(job.cores, 1),
        "cpus_allocated": job.cpus,
        "kwh": None if job.kwh is None else _round(job.kwh),
        "cost": None if prices.gpu_hour is None else round(hours * prices.gpu_hour, 2),
        "energy_cost": None if prices.kwh is None or job.kwh is None else round(job.kwh * prices.kwh, 2),
        "findings": [
            [round(one.begin), one.end and round(one.end), one.sentence[:120]]
            for one in sorted(job.findings, key=lambda one: -one.ratio)[:findings]
        ],
    }
    return {name: value for name, value in line.items() if value not in (None, [])}


def _round(value: float) -> float:
    return float(f"{value:.4g}")
