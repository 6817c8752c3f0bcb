"""The job report as a page of plain text, as for an e-mail."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import NamedTuple

from rankscope.cli.explaining.command import MEANINGS as IN_SHORT
from rankscope.record.quantities import count, duration, percent
from rankscope_exporter.diagnosis.words import advice_by_cause
from rankscope_exporter.job_report.job import NO_RANK, Job, JobFinding

WIDTH = 100
BAR = 30
GPUS_SHOWN, FINDINGS_SHOWN, CAPTURES_SHOWN = 16, 12, 6
MIN_SHOWN, MIN_NOTED = 0.005, 0.05
"""The least ratios of the GPU time for a separate line, and for a note with advice."""
MIN_BUSY = 0.15
"""The busy ratio below which GPUs were hardly used: Princeton's jobstats warns there as well."""
MIN_CPUS, MIN_CPUS_USED = 8, 0.25
"""A note is shown if less than MIN_CPUS_USED of more than MIN_CPUS CPUs are used."""
LATEST = 2.0**37
"""The largest unix time that is shown: a record may have any."""
GIB, KWH = 2.0**30, 3.6e6
MEANINGS: Mapping[str, str] = {
    **IN_SHORT,
    "none": "forward, backward, optimizer",
    "data": "waiting for data",
    "collective_wait": "waiting in collectives, late rank unknown",
    NO_RANK: "allocated, but no rank trained",
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
"""By cause of lost time: the kind and cause of the finding that has its advice."""


class Prices(NamedTuple):
    """The prices of a GPU-hour and of a kilowatt-hour, in any currency. None leaves the costs out."""

    gpu_hour: float | None = None
    kwh: float | None = None


def lines(job: Job, prices: Prices) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from _head(job)
    yield from ("", f"Where {hours(job.gpu_seconds)} went", *_parts(job))
    sections = {
        "Use": [*_use(job)],
        "Energy and cost": [*_cost(job, prices)],
        "Findings": [*_findings(job)],
        "Captures": [f"  {one}/report.html" for one in job.captures[-CAPTURES_SHOWN:]],
        "Notes": [line for note in _notes(job) for line in _wrapped(note, "  * ")],
    }
    for title, content in sections.items():
        if content:
            yield from ("", title, *content)


def _head(job: Job) -> Iterator[str]:
    slurm = job.slurm
    who = f" of {job.user or f'uid {job.owner}'}" if job.user or job.owner else ""
    if slurm.get("job_id"):
        name = f" ({slurm['job_name']})" if slurm.get("job_name") else ""
        more = [f"{what} {slurm[what]}" for what in ("account", "partition") if slurm.get(what)]
        yield ", ".join([f"Slurm job {slurm['job_id']}{name}{who}", *more])
        who = ""
    ranks, nodes = count(job.ranks, "rank"), ", ".join(job.nodes[:8]) + (" ..." if len(job.nodes) > 8 else "")
    yield f"Run {', '.join(job.runs)}{who}: {ranks} on {count(len(job.nodes), 'node')} ({nodes})"
    begin, end = _moment(job.began), "now" if job.ended is None else _moment(job.ended)
    state = f", {job.allocation.state.lower()}" if job.allocation and job.allocation.state else ""
    steps = f", {job.steps:.0f} steps" if job.steps else ""
    yield f"{begin} to {end}: {duration(job.seconds)}{steps}{state}"


def _parts(job: Job) -> Iterator[str]:
    small = 0.0
    for cause, ratio in job.ratios.items():
        if ratio < MIN_SHOWN and cause != "none":
            small += ratio
            continue
        name = {"none": "useful compute", "unknown": "unknown"}.get(cause, f"lost: {cause}")
        yield _part(name, ratio, job, MEANINGS.get(cause, ""))
    if small:
        yield _part("lost: all others", small, job, "")


def _part(name: str, ratio: float, job: Job, meaning: str) -> str:
    return f"  {name:22}{_share(ratio)}  {hours(ratio * job.gpu_seconds):>16}  {meaning}".rstrip()


def _use(job: Job) -> Iterator[str]:
    if busy := job.busy_ratios:
        yield f"  {'GPUs busy':22}{_share(fmean(busy))}"
    if memory := job.memory_ratios:
        yield f"  {'peak GPU memory':22}{_share(max(memory))}"
    if job.cores is not None:
        ratio = f"{_share(job.cores / job.cpus)}  " if job.cpus else ""
        yield f"  {'CPUs':22}{ratio}{job.cores:.1f} {f'of {job.cpus} ' if job.cpus else ''}cores"
    if job.memory:
        yield f"  {'peak memory':22}{job.memory / GIB:.1f} GiB in the ranks' own processes"
    for gpu in job.gpus[:GPUS_SHOWN]:
        known = [f"{percent(gpu.busy_ratio)} busy"] if gpu.busy_ratio is not None else []
        if gpu.memory is not None and gpu.memory_total:
            known.append(f"{gpu.memory / GIB:.1f} of {gpu.memory_total / GIB:.0f} GiB")
        if gpu.joules is not None:
            known.append(f"{gpu.joules / KWH:.2g} kWh")
        yield f"    {gpu.node} GPU {gpu.index}: {', '.join(known) or 'no data'}"
    if len(job.gpus) > GPUS_SHOWN:
        yield f"    and {len(job.gpus) - GPUS_SHOWN} more GPUs"


def _cost(job: Job, prices: Prices) -> Iterator[str]:
    if job.kwh is not None:
        money = f", {job.kwh * prices.kwh:.2f} at {prices.kwh:g} per kWh" if prices.kwh is not None else ""
        yield f"  energy of the GPUs    {job.kwh:.3g} kWh{money}"
    if prices.gpu_hour is not None:
        total = job.gpu_seconds / 3600 * prices.gpu_hour
        lost = total * (1.0 - sum(job.ratios.get(cause, 0.0) for cause in ("none", "unknown")))
        yield f"  GPU time              {total:.2f} at {prices.gpu_hour:g} per GPU-hour, {lost:.2f} of it lost"


def _findings(job: Job) -> Iterator[str]:
    for one in job.findings[:FINDINGS_SHOWN]:
        end = "now" if one.end is None else clock(one.end)
        lasted = duration(max((job.at if one.end is None else one.end) - one.begin, 0.0))
        times = clock(one.begin) if one.kind == "crash" else f"{clock(one.begin)} to {end} ({lasted})"
        yield from _wrapped(f"{times}, {one.severity}: {one.sentence}{_span(one, lasted)}", "  ")
        yield from _wrapped(one.advice, "    ")
    if len(job.findings) > FINDINGS_SHOWN:
        yield f"  and {len(job.findings) - FINDINGS_SHOWN} more"


def _span(one: JobFinding, lasted: str) -> str:
    """Return which number the sentence has, which is the worst, and the mean; empty if they are the same."""
    if one.kind == "low_utilization":  # its sentence has not the lost ratio but the rest
        worst, mean, at = 1.0 - one.ratio, None if one.mean is None else 1.0 - one.mean, "at least"
    else:
        worst, mean, at = one.ratio, one.mean, "at most"
    if percent(worst) not in one.sentence or (mean is not None and percent(mean) == percent(worst)):
        return ""
    return f" ({at} {percent(worst)}{'' if mean is None else f', {percent(mean)} on average over {lasted}'})"


def _notes(job: Job) -> Iterator[str]:
    """Yield advice on large losses without a finding, and on allocated resources that were not used."""
    if job.is_partial:
        yield f"Only {job.ranks} of {job.world_size} ranks are on this node. Use --url for a report on all of them."
    found = {one.kind for one in job.findings}
    for cause, ratio in job.ratios.items():
        kind, why = ADVICE.get(cause, ("", ""))
        texts = advice_by_cause(kind) if kind else {}
        advice = texts.get(why, texts.get("", "")).replace("--rank RANK", "--rank N")
        if ratio >= MIN_NOTED and advice and kind not in found:
            yield f"{percent(ratio)} of the job's GPU time is lost to {cause}. {advice}"
    if job.ratios.get(NO_RANK, 0.0) >= MIN_NOTED:
        yield (
            f"No rank trained in {percent(job.ratios[NO_RANK])} of the allocated GPU time: work before or after the "
            "training, GPUs without a rank, or a training without the hook."
        )
    unused = [f"{gpu.node} GPU {gpu.index}" for gpu in job.gpus if gpu.busy_ratio is not None and gpu.busy_ratio < 0.01]
    if unused:
        yield f"No kernel ran on {', '.join(unused)}. Request fewer GPUs, or check that the script uses all of them."
    if job.busy_ratios and not unused and (busy := fmean(job.busy_ratios)) < MIN_BUSY:
        yield f"The GPUs were busy for only {percent(busy)} of the time."
    if job.cpus and job.cores is not None and job.cpus > MIN_CPUS and job.cores < MIN_CPUS_USED * job.cpus:
        yield f"The job used {job.cores:.1f} of {job.cpus} CPU cores. Request fewer, or use more loader workers."


def group_lines(groups: Mapping[str, Mapping[str, float]], by: str, days: float, prices: Prices) -> Iterator[str]:
    """Yield GPU-hours and their losses for each user, account or partition, the largest losses first."""
    money = "" if prices.gpu_hour is None else f"{'cost of lost':>14}"
    yield f"GPU-hours in the last {days:g} days by {by}"
    yield f"  {by:24}{'GPU-hours':>12}{'useful':>8}{'lost':>12}{money}  causes"
    for name, causes in sorted(groups.items(), key=lambda item: item[1].get("none", 0.0) - sum(item[1].values())):
        whole, useful = sum(causes.values()), causes.get("none", 0.0)
        worst = sorted(((c, s) for c, s in causes.items() if c != "none" and s), key=lambda item: -item[1])[:3]
        lost = (whole - useful) / 3600
        cost = "" if prices.gpu_hour is None else f"{lost * prices.gpu_hour:>14.2f}"
        shares = ", ".join(f"{cause} {percent(seconds / whole)}" for cause, seconds in worst)
        row = f"{whole / 3600:>12.3g}{percent(useful / whole) if whole else '':>8}{lost:>12.3g}{cost}"
        yield f"  {name or '(unknown)':24}{row}  {shares}"


def _wrapped(text: str, indent: str) -> list[str]:
    """Return lines of WIDTH characters. Those after the first one are indented by four."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent="    ")


def _share(ratio: float) -> str:
    filled = round(BAR * min(max(ratio, 0.0), 1.0))
    return f"[{'|' * filled}{' ' * (BAR - filled)}] {percent(ratio):>5}"


def hours(seconds: float) -> str:
    """Return GPU time: `1.2 GPU-hours`, `40 GPU-seconds`."""
    if seconds >= 360.0:
        return f"{seconds / 3600:.3g} GPU-hours"
    return f"{seconds:.0f} GPU-seconds" if seconds >= 9.5 else f"{seconds:.1f} GPU-seconds"


def _moment(unix: float) -> str:
    return f"{time.strftime('%Y', _local(unix))}-{clock(unix)}"


def clock(unix: float) -> str:
    """Return a unix time without its year, in the time zone of this machine."""
    return time.strftime("%m-%d %H:%M:%S", _local(unix))


def _local(unix: float) -> time.struct_time:
    return time.localtime(min(max(unix, 0.0), LATEST))
