"""Jobs from a Prometheus that scrapes the exporters: of all nodes, for as long as it keeps its samples.

GPU time and findings are those of the exporters' accounts, as in their journals.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.prometheus import Prometheus, quoted
from rankscope_exporter.job_report.found import Connect, findings
from rankscope_exporter.job_report.job import Gpu, Job, NoJobError, merge_jobs, select_job

LOOK_BACK = "30d"
SHOWN_AFTER_END = 600.0
"""Seconds for which an exporter shows the account of an ended run."""
SAMPLES = 2000
"""The number of samples of an account in a sum over time."""
MIN_STEP = 15
"""The least seconds between two samples of a sum over all runs."""
OUTAGE = "1h"
"""The longest time without a scrape after which an account continues. It may exceed SHOWN_AFTER_END."""
GROUPS = {"user": "user", "account": "slurm_account", "partition": "slurm_partition"}
"""By group: the label of rankscope_gpu_allocation_info that names it."""
ALMOST_ALL = 0.95
"""The part of the exporters' GPU time that an analyzer which saw the whole run has counted at least."""
SECONDS_SINCE_START = (
    'time() - max_over_time((min(rankscope_rank_start_timestamp_seconds{{{0},rank="0"}}) > time() - 600 unless '
    f'group(last_over_time(rankscope_rank_up{{{{{{0}},rank="0"}}}}[10m] offset 1m)))[{LOOK_BACK}:1m])'
)
"""The time since the start of the last run with a name: rank 0 started in the last 10 min and was not there before.

If it had started earlier, Prometheus or the exporter was down. A restart within 20 min of the end continues the run.
"""


def job(connect: Connect, run: str | None, job_id: str | None, owner: str | None) -> Job:
    """Return the job that matches. Raise NoJobError or PrometheusError."""
    now = connect(None)
    allocations = [] if job_id is None else _allocations(now, job_id)
    wanted = [] if run is None else [f"run={quoted(run)}"]
    # The owner is empty with --collector.ranks.owner.
    wanted += [] if owner is None else [f"owner=~{quoted(re.escape(owner) + '|')}"]
    wanted += [] if job_id is None else [f"run=~{_any_of(_runs_named_in(allocations))}"]
    known = now.query(f"group by (run, owner) (last_over_time(rankscope_rank_info{{{','.join(wanted)}}}[{LOOK_BACK}]))")
    runs = sorted({(sample.labels.get("run", ""), sample.labels.get("owner", "")) for sample in known})
    if job_id is not None:
        runs = [one for one in runs if any(_is_named_in(sample, *one) for sample in allocations)]
        _check_shared(allocations, job_id, [name for name, _ in runs])
    if not runs:
        raise NoJobError(f"{now.url} has no data of this job in the last {LOOK_BACK}")
    slurm = _slurm(allocations, job_id)
    summaries = [_summary(now, *one, slurm) for one in runs]
    selected = select_job(summaries, run, job_id, owner)
    return _with_details(connect, [one for one in summaries if set(one.runs) <= set(selected.runs)])


def _allocations(now: Prometheus, job_id: str) -> Sequence[Sample]:
    """Return the job's allocations of GPUs with runs: those that name no other job, if there are any."""
    jobs = quoted(f"(.*,)?{re.escape(job_id)}(,.*)?")
    found = now.query(f'last_over_time(rankscope_gpu_allocation_info{{slurm_job_id=~{jobs},run!=""}}[{LOOK_BACK}])')
    if not found:
        raise NoJobError(f"{now.url} has no data of this job in the last {LOOK_BACK}")
    return [sample for sample in found if sample.labels.get("slurm_job_id", job_id) == job_id] or found


def _runs_named_in(allocations: Sequence[Sample]) -> set[str]:
    """Return the names that a label may list: they are separated by commas, and a name can have commas."""
    lists = [sample.labels.get("run", "").split(",") for sample in allocations]
    return {",".join(one[i:j]) for one in lists for i in range(len(one)) for j in range(i + 1, len(one) + 1)}


def _is_named_in(allocation: Sample, run: str, owner: str) -> bool:
    listed = allocation.labels.get("run", ""), allocation.labels.get("owner", "")
    return all(f",{one}," in f",{names}," for one, names in zip((run, owner), listed, strict=True))


def _check_shared(allocations: Sequence[Sample], job_id: str, runs: Sequence[str]) -> None:
    """Raise NoJobError if the runs may belong to other jobs, which always had the same GPUs."""
    if len(runs) > 1 and any(sample.labels.get("slurm_job_id", job_id) != job_id for sample in allocations):
        raise NoJobError(
            f"other jobs use the GPUs of Slurm job {job_id}, too; choose one run with --run: {', '.join(runs)}"
        )


def _slurm(allocations: Sequence[Sample], job_id: str | None) -> Mapping[str, str]:
    if job_id is None or not allocations:
        return {}
    labels = {"job_name": "slurm_job_name", "account": "slurm_account", "partition": "slurm_partition"}
    named = {
        name: next((one.labels[label] for one in allocations if one.labels.get(label)), "")
        for name, label in labels.items()
    }
    return {"job_id": job_id, **named}


def _where(run: str, owner: str) -> str:
    return f"run={quoted(run)},owner={quoted(owner)}"


def _summary(now: Prometheus, run: str, owner: str, slurm: Mapping[str, str]) -> Job:
    """Return a run's owner, nodes, ranks and times."""
    where = _where(run, owner)
    age = _value(now.query(SECONDS_SINCE_START.format(where)))
    life = LOOK_BACK if age is None else f"{round(age) + 60}s"
    ranks = now.query(f"last_over_time(rankscope_rank_info{{{where}}}[{life}])")
    began = _value(now.query(f"min(min_over_time(rankscope_rank_start_timestamp_seconds{{{where}}}[{life}]))"))
    ended = _value(now.query(f"max(max_over_time(rankscope_rank_exit_timestamp_seconds{{{where}}}[{life}]))"))
    progress = f"rankscope_rank_last_progress_timestamp_seconds{{{where}}}"
    seen = _value(now.query(f"max(max_over_time({progress}[{life}]))"))
    alive = now.query(f"rankscope_rank_up{{{where}}} == 1")
    present = _value(now.query(f"max(timestamp(rankscope_rank_up{{{where}}} == 1))"))  # a rank that hangs is, too
    at = max(value for value in (began, ended, seen, present) if value is not None) if began else 0.0
    return Job(
        runs=[run],
        owner=owner,
        user=next((one.labels["user"] for one in ranks if one.labels.get("user")), ""),
        slurm=slurm,
        nodes=sorted({one.labels.get("node", "") for one in ranks}),
        ranks=len({one.labels.get("rank") for one in ranks}),
        began=began or 0.0,
        ended=None if alive else ended if ended is not None else at,
        at=at,
    )


def _with_details(connect: Connect, jobs: Sequence[Job]) -> Job:
    """Return the runs of a job, merged and with their details, without runs that have no data yet."""
    if found := [_add_details(connect, one) for one in jobs if one.end > one.began]:
        return merge_jobs(found)
    raise NoJobError(f"run {jobs[0].runs[0]} has just started: no data yet")


def _add_details(connect: Connect, one: Job) -> Job:
    """Return the job with its use of resources and its findings."""
    then, where = connect(one.end), _where(one.runs[0], one.owner)
    life = f"{max(round(one.end - one.began), 1) + 1}s"
    cpu = f"sum(max_over_time(rankscope_rank_cpu_seconds_total{{{where}}}[{life}]))"
    memory = f"max_over_time(sum(rankscope_rank_resident_memory_bytes{{{where}}})[{life}:1m])"
    steps = f"max(max_over_time(rankscope_rank_steps_total{{{where}}}[{life}]))"
    later, lasted = connect(one.end + SHOWN_AFTER_END), one.end - one.began + SHOWN_AFTER_END
    counted = _counted(later, where, lasted)
    if counted and one.ended is None:
        counted = _until_now(then, where, counted, one.ranks)
    return replace(
        one,
        causes=counted or {"unknown": one.ranks * (one.end - one.began)},
        gpus=_gpus(then, where, life),
        findings=[*findings(connect, where, one)],
        captures=_captures(later, where, lasted),
        cpu_seconds=_value(then.query(cpu)),
        memory=_value(then.query(memory)),
        steps=_value(then.query(steps)) or 0.0,
    )


def _counted(later: Prometheus, where: str, seconds: float) -> Mapping[str, float]:
    """Return the ranks' time by cause as the analyzer counts it, or else the exporters.

    A node's exporter may have had several addresses. The analyzer's account, of all nodes, names none.
    """
    accounts: dict[tuple[tuple[str, str], ...], dict[str, float]] = defaultdict(dict)
    for sample in later.query(f"last_over_time(rankscope_run_gpu_seconds{{{where}}}[{round(seconds)}s])", "cause"):
        labels = tuple(sorted((name, text) for name, text in sample.labels.items() if name != "cause"))
        accounts[labels][sample.labels["cause"]] = sample.value
    # A node's newest account is the largest.
    ordered = sorted(accounts.items(), key=lambda item: sum(item[1].values()))
    of_nodes = {dict(labels).get("node", ""): account for labels, account in ordered}
    of_run = of_nodes.pop("", {})
    causes: dict[str, float] = defaultdict(float)
    for account in of_nodes.values():
        for cause, spent in account.items():
            causes[cause] += spent
    # An analyzer that stopped during the run counted less.
    return of_run if sum(of_run.values()) >= ALMOST_ALL * sum(causes.values()) else causes


def _until_now(then: Prometheus, where: str, counted: Mapping[str, float], ranks: int) -> Mapping[str, float]:
    """Return the time by cause of a running job with the time since the last scrape, by the ratios of then."""
    age = _value(then.query(f"time() - max(timestamp(rankscope_run_gpu_seconds{{{where}}}))")) or 0.0
    current = then.query(f"max by (cause) (rankscope_run_lost_ratio{{{where}}})", "cause")
    ratios = {one.labels["cause"]: one.value for one in current}
    return {cause: counted.get(cause, 0.0) + ratios.get(cause, 0.0) * ranks * age for cause in {**counted, **ratios}}


def _captures(later: Prometheus, where: str, seconds: float) -> Sequence[str]:
    """Return where the run was captured, the oldest first."""
    selected = f"last_over_time(rankscope_run_capture_timestamp_seconds{{{where}}}[{round(seconds)}s])"
    found = sorted(later.query(selected, "path"), key=lambda sample: sample.value)
    return [f"{sample.labels.get('node', '')}:{sample.labels['path']}" for sample in found]


def _gpus(then: Prometheus, where: str, life: str) -> Sequence[Gpu]:
    ranks = then.query(f'last_over_time(rankscope_rank_info{{{where},uuid!=""}}[{life}])', "uuid")
    nodes = {sample.labels["uuid"]: sample.labels.get("node", "") for sample in ranks}
    if not nodes:
        return ()
    here = f"uuid=~{_any_of(nodes)}"
    busy = _by_uuid(then, f"rate(rankscope_gpu_busy_seconds_total{{{here}}}[{life}])")
    joules = _by_uuid(then, f"increase(rankscope_gpu_energy_joules_total{{{here}}}[{life}])")
    memory = _by_uuid(then, f"max_over_time(rankscope_gpu_memory_used_bytes{{{here}}}[{life}])")
    total = _by_uuid(then, f"max_over_time(rankscope_gpu_memory_total_bytes{{{here}}}[{life}])")
    index = {
        sample.labels["uuid"]: sample.labels.get("gpu", "")
        for sample in then.query(f"last_over_time(rankscope_gpu_up{{{here}}}[{life}])", "uuid")
    }
    return [
        Gpu(node, index.get(uuid, ""), busy.get(uuid), memory.get(uuid), total.get(uuid), joules.get(uuid))
        for uuid, node in sorted(nodes.items(), key=lambda item: (item[1], index.get(item[0], "").zfill(4)))
    ]


def groups(prometheus: Prometheus, by: str, days: float) -> Mapping[str, Mapping[str, float]]:
    """Return GPU seconds by cause for each user, account or partition; an unknown name is empty."""
    span, label, step = f"{round(days * 86400)}s", GROUPS[by], max(round(days * 86400 / SAMPLES), MIN_STEP)
    spent = prometheus.query(f"sum by (run, owner, cause) (sum_over_time(({_spent(step)})[{span}:{step}s]))", "cause")
    allocations = f'last_over_time(rankscope_gpu_allocation_info{{run!="",{label}!=""}}[{span}])'
    holders = prometheus.query(f"group by (run, owner, {label}) ({allocations})")
    names = {(one.labels.get("run", ""), one.labels.get("owner", "")): one.labels.get(label, "") for one in holders}
    shared = [one for one in holders if "," not in one.labels.get(label, "")]
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in spent:
        run = one.labels.get("run", ""), one.labels.get("owner", "")
        if run not in names:  # it always shared its GPUs: only one user's, account's or partition's runs can be named
            names[run] = next((other.labels.get(label, "") for other in shared if _is_named_in(other, *run)), "")
        found[names[run]][one.labels["cause"]] += one.value
    if not found:
        raise NoJobError(f"{prometheus.url} has no run of a Rankscope exporter in the last {days:g} days")
    return found


def _spent(step: int) -> str:
    """Return an expression for the GPU seconds by cause that each node's account of a run has gained in a step.

    An account that is much smaller than before is the next run's with this name. Parts of an account may decrease.
    """
    account = 'rankscope_run_gpu_seconds{node!=""}'  # without the analyzer's, which are of the same ranks
    now = f"max by (run, owner, cluster, node, cause) (last_over_time({account}[{step}s]))"
    before = f"max by (run, owner, cluster, node, cause) (last_over_time({account}[{OUTAGE}] offset {step}s))"
    continues = f"sum without (cause) ({now}) > sum without (cause) ({before}) / 2"
    return f"({now} - {before} and on (run, owner, cluster, node) {continues}) or {now}"


def _any_of(names: Iterable[str]) -> str:
    """Return a quoted regular expression that matches these names."""
    return quoted("|".join(map(re.escape, sorted(names))))


def _by_uuid(then: Prometheus, expression: str) -> Mapping[str, float]:
    return {sample.labels["uuid"]: sample.value for sample in then.query(expression, "uuid")}


def _value(samples: Sequence[Sample]) -> float | None:
    return samples[0].value if samples else None
