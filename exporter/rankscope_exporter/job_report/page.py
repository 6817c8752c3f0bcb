"""A job's report on one page, as text for a mail."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rankscope.cli.explaining.alerts import KNOWN
from rankscope_exporter.diagnosis.words import advice_by_cause, duration, percent
from rankscope_exporter.job_report.job import NO_RANK, Job

WIDTH = 100
BAR = 30
GPUS_SHOWN, FINDINGS_SHOWN = 16, 12
SHOWN_FROM, NOTED_FROM = 0.005, 0.05
"""Ratios of the GPU time: of a line of its own, and of a note with advice."""
BUSY_FROM = 0.15
"""Below, a GPU was asked for and hardly used: Princeton's jobstats warns from there on."""
CPUS_FROM, CPUS_USED = 8, 0.25
"""CPUs from which on it matters that fewer than this part of them are used."""
GIB, KWH = 2.0**30, 3.6e6
MEANINGS: Mapping[str, str] = {
    **KNOWN["meanings"],
    "none": "forward, backward, optimizer",
    "data": "waiting for data",
    "collective_wait": "waiting in collectives, for whom is not known",
    NO_RANK: "given to the job, and no rank trained",
}
ADVICE = {
    "data": ("data", "unknown"),
    "data_cpu": ("data", "cpu"),
    "data_io": ("data", "io"),
    "transfer": ("network", "network"),
    "bubble": ("bubble", ""),
    "stage_imbalance": ("stage_imbalance", ""),
    "copies": ("copies", ""),
    "launch": ("launch", ""),
    "device_read": ("device_reads", ""),
    "throttling": ("throttling", ""),
    "checkpoint": ("slow_checkpoint", ""),
    "startup": ("slow_startup", ""),
    "straggler": ("straggler", ""),
}
"""By cause, the kind and cause of the finding whose advice is its."""


class Prices(NamedTuple):
    """Money for an hour of a GPU and for a kilowatt-hour, in any currency. None is not asked for."""

    gpu_hour: float | None = None
    kwh: float | None = None


def lines(job: Job, prices: Prices) -> Iterator[str]:
    """Yield the page's lines."""
    yield from _head(job)
    yield ""
    yield f"Where {_hours(job.gpu_seconds)} went"
    yield from _parts(job)
    if use := [*_use(job)]:
        yield ""
        yield "Use"
        yield from use
    if cost := [*_cost(job, prices)]:
        yield ""
        yield "Energy and money"
        yield from cost
    if job.findings:
        yield ""
        yield "Findings"
        yield from _findings(job)
    if notes := [*_notes(job)]:
        yield ""
        yield "Notes"
        for note in notes:
            yield from textwrap.wrap(note, WIDTH, initial_indent="  * ", subsequent_indent="    ")


def _head(job: Job) -> Iterator[str]:
    slurm = job.slurm
    who = f" of {job.user or f'uid {job.owner}'}" if job.user or job.owner else ""
    if slurm.get("job_id"):
        name = f" ({slurm['job_name']})" if slurm.get("job_name") else ""
        more = [f"{what} {slurm[what]}" for what in ("account", "partition") if slurm.get(what)]
        yield ", ".join([f"Slurm job {slurm['job_id']}{name}{who}", *more])
        who = ""
    ranks, nodes = _count(job.ranks, "rank"), ", ".join(job.nodes[:8]) + (" ..." if len(job.nodes) > 8 else "")
    yield f"Run {', '.join(job.runs)}{who}: {ranks} on {_count(len(job.nodes), 'node')} ({nodes})"
    begin, end = _moment(job.began), "now" if job.ended is None else _moment(job.ended)
    state = f", {job.allocation.state.lower()}" if job.allocation and job.allocation.state else ""
    steps = f", {job.steps:.0f} steps" if job.steps else ""
    yield f"{begin} to {end}: {duration(job.seconds)}{steps}{state}"


def _parts(job: Job) -> Iterator[str]:
    small = 0.0
    for cause, ratio in job.ratios.items():
        if ratio < SHOWN_FROM and cause != "none":
            small += ratio
            continue
        name = "useful compute" if cause == "none" else f"lost: {cause}"
        yield _part(name, ratio, job, MEANINGS.get(cause, ""))
    if small:
        yield _part("lost: the rest", small, job, "")


def _part(name: str, ratio: float, job: Job, meaning: str) -> str:
    return f"  {name:22}{_bar(ratio)} {percent(ratio):>5}  {_hours(ratio * job.gpu_seconds):>16}  {meaning}".rstrip()


def _use(job: Job) -> Iterator[str]:
    busy = [gpu.busy_ratio for gpu in job.gpus if gpu.busy_ratio is not None]
    memory = [gpu.memory / gpu.memory_total for gpu in job.gpus if gpu.memory is not None and gpu.memory_total]
    if busy:
        yield f"  {'GPUs busy':22}{_bar(sum(busy) / len(busy))} {percent(sum(busy) / len(busy)):>5}"
    if memory:
        yield f"  {'GPU memory at most':22}{_bar(max(memory))} {percent(max(memory)):>5}"
    if job.cpu_seconds is not None and job.seconds:
        cores = job.cpu_seconds / job.seconds
        ratio = f"{_bar(cores / job.cpus)} {percent(cores / job.cpus):>5}  " if job.cpus else ""
        yield f"  {'CPUs':22}{ratio}{cores:.1f} {f'of {job.cpus} ' if job.cpus else ''}cores"
    if job.memory:
        yield f"  {'memory at most':22}{job.memory / GIB:.1f} GiB, of the ranks' own processes"
    for gpu in job.gpus[:GPUS_SHOWN]:
        known = [f"{percent(gpu.busy_ratio)} busy"] if gpu.busy_ratio is not None else []
        if gpu.memory is not None and gpu.memory_total:
            known.append(f"{gpu.memory / GIB:.1f} of {gpu.memory_total / GIB:.0f} GiB")
        if gpu.joules is not None:
            known.append(f"{gpu.joules / KWH:.2g} kWh")
        yield f"    {gpu.node} GPU {gpu.index}: {', '.join(known) or 'nothing is known'}"
    if len(job.gpus) > GPUS_SHOWN:
        yield f"    and {len(job.gpus) - GPUS_SHOWN} more GPUs"


def _cost(job: Job, prices: Prices) -> Iterator[str]:
    if job.kwh is not None:
        money = f", {job.kwh * prices.kwh:.2f} at {prices.kwh:g} a kWh" if prices.kwh is not None else ""
        yield f"  energy of the GPUs    {job.kwh:.3g} kWh{money}"
    if prices.gpu_hour is not None:
        total = job.gpu_seconds / 3600 * prices.gpu_hour
        lost = total * (1.0 - job.ratios.get("none", 0.0))
        yield f"  GPU time              {total:.2f} at {prices.gpu_hour:g} a GPU-hour, of which {lost:.2f} was lost"


def _findings(job: Job) -> Iterator[str]:
    for one in job.findings[:FINDINGS_SHOWN]:
        end = "now" if one.end is None else _clock(one.end)
        lasted = duration(max((job.at if one.end is None else one.end) - one.begin, 0.0))
        first = f"{_clock(one.begin)} to {end} ({lasted}), {one.severity}: "
        yield from textwrap.wrap(f"{first}{one.sentence}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        yield from textwrap.wrap(one.advice, WIDTH, initial_indent="    ", subsequent_indent="    ")
    if len(job.findings) > FINDINGS_SHOWN:
        yield f"  and {len(job.findings) - FINDINGS_SHOWN} more"


def _notes(job: Job) -> Iterator[str]:
    """Yield advice on what costs most and has no finding, and on what was asked for and not used."""
    if job.is_partial:
        yield f"This is of {job.ranks} of its {job.world_size} ranks; the others are on other nodes: --url has all."
    found = {one.kind for one in job.findings}
    for cause, ratio in job.ratios.items():
        kind, why = ADVICE.get(cause, ("", ""))
        texts = advice_by_cause(kind) if kind else {}
        advice = texts.get(why, texts.get("", "")).replace("--rank RANK", "--rank N")
        if ratio >= NOTED_FROM and advice and kind not in found:
            yield f"{percent(ratio)} of the GPU time is lost to {cause}. {advice}"
    if job.ratios.get(NO_RANK, 0.0) >= NOTED_FROM:
        yield (
            f"{percent(job.ratios[NO_RANK])} of the GPU time was given to the job and no rank trained in it: work "
            "before and after the training, GPUs without a rank, or a training that the hook did not watch."
        )
    unused = [f"{gpu.node} GPU {gpu.index}" for gpu in job.gpus if gpu.busy_ratio is not None and gpu.busy_ratio < 0.01]
    if unused:
        yield f"No kernel ran on {', '.join(unused)}: ask for fewer GPUs, or check that the script uses all of them."
    busy = [gpu.busy_ratio for gpu in job.gpus if gpu.busy_ratio is not None]
    if busy and not unused and sum(busy) / len(busy) < BUSY_FROM:
        yield f"The GPUs were busy {percent(sum(busy) / len(busy))} of the time."
    if job.cpus and job.cpu_seconds is not None and job.seconds and job.cpus > CPUS_FROM:
        cores = job.cpu_seconds / job.seconds
        if cores < CPUS_USED * job.cpus:
            yield f"It used {cores:.1f} of {job.cpus} CPU cores: ask for fewer, or use more loader workers."


def group_lines(groups: Mapping[str, Mapping[str, float]], by: str, days: float, prices: Prices) -> Iterator[str]:
    """Yield GPU-hours and what they were lost to, of each user, account or partition; who lost most comes first."""
    money = "" if prices.gpu_hour is None else f"{'lost money':>12}"
    yield f"GPU-hours of the last {days:g} days by {by}"
    yield f"  {by:24}{'GPU-hours':>12}{'useful':>8}{'lost':>12}{money}  lost to"
    for name, causes in sorted(groups.items(), key=lambda item: item[1].get("none", 0.0) - sum(item[1].values())):
        whole, useful = sum(causes.values()), causes.get("none", 0.0)
        worst = sorted(((c, s) for c, s in causes.items() if c != "none" and s), key=lambda item: -item[1])[:3]
        lost = (whole - useful) / 3600
        cost = "" if prices.gpu_hour is None else f"{lost * prices.gpu_hour:>12.2f}"
        to = ", ".join(f"{cause} {percent(seconds / whole)}" for cause, seconds in worst)
        row = f"{whole / 3600:>12.3g}{percent(useful / whole) if whole else '':>8}{lost:>12.3g}{cost}"
        yield f"  {name or 'not known':24}{row}  {to}"


def _bar(ratio: float) -> str:
    filled = round(BAR * min(max(ratio, 0.0), 1.0))
    return f"[{'|' * filled}{' ' * (BAR - filled)}]"


def _hours(seconds: float) -> str:
    if seconds >= 360.0:
        return f"{seconds / 3600:.3g} GPU-hours"
    return f"{seconds:.0f} GPU-seconds" if seconds >= 9.5 else f"{seconds:.1f} GPU-seconds"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _moment(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _clock(unix: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(unix))
