"""Reports of this node's GPUs, from the families of /metrics; busy and throttled time over the last seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.report.values import Values

HOLDER_TEXTS = (
    ("slurm_job_id", "job {}"),
    ("slurm_job_name", "{}"),
    ("k8s_pod", "pod {}"),
    ("run", "run {}"),
    ("rank", "rank {}"),
    ("user", "user {}"),
)
COLUMNS = (
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "temperature_celsius",
    "processes",
    "last_busy_timestamp_seconds",
    "busy_seconds_total",
)
GIBIBYTE = 2**30
MIN_THROTTLED = 0.3
"""Ratio of the time from which a GPU is marked as throttled, the same as for the cause of a straggler."""
MIN_SHOWN = 0.005
WORKS_WITHIN = 10.0
"""Seconds since the last kernel for which a GPU is shown as working. The state `working` has pauses of a minute."""
HOT_WITHIN = 3.0
"""Degrees Celsius below the temperature at which a GPU slows down."""
CULPRIT_RUNS = 3
"""Runs of the last week from which a GPU that was their culprit is a problem, as in the alert."""
POWER_CAP = "sw_power_cap"
"""The only reason that does not indicate a defect: a GPU at its power limit works at full capacity."""
BAD_STATES: Mapping[str, str] = {
    "suspected_hang": "runs kernels for ranks that make no progress",
    "memory_held_by_dead": "has memory that a dead process holds",
}


@dataclass(frozen=True)
class GpuReport:
    """One GPU. Unknown values are None or empty."""

    index: str
    uuid: str
    name: str
    is_up: bool
    state: str
    holder: str
    processes: int | None
    memory_used: float | None
    """Bytes, as `memory_total`."""
    memory_total: float | None
    power: float | None
    """Watts."""
    temperature: float | None
    """Degrees Celsius."""
    is_hot: bool
    idle_seconds: float | None
    """Seconds since a kernel last ran."""
    has_worked: bool
    """True if a kernel was ever seen running; otherwise `idle_seconds` starts at the first reading."""
    busy_ratio: float | None
    throttled: Mapping[str, float]
    """Ratio of the time by reason, the largest first."""
    culprit_runs: int = 0
    """The runs of the last week in which it was the culprit, as far as they are known."""

    @property
    def memory(self) -> str:
        """Return its used and its whole memory in GiB; empty if they are unknown."""
        if self.memory_used is None or self.memory_total is None:
            return ""
        return f"{self.memory_used / GIBIBYTE:.1f} / {self.memory_total / GIBIBYTE:.0f}"

    @property
    def throttling(self) -> str:
        """Return the longest reason for throttling and its share of the time; empty if there is none."""
        reason, ratio = next(iter(self.throttled.items()), ("", 0.0))
        return f"{reason.replace('_', ' ')} {ratio:.0%}" if ratio >= MIN_SHOWN else ""

    @property
    def throttling_mark(self) -> str:
        """Return `bad` for a throttled GPU, `warn` for one at its power limit."""
        reason, ratio = next(iter(self.throttled.items()), ("", 0.0))
        return "" if ratio < MIN_THROTTLED else "warn" if reason == POWER_CAP else "bad"

    @property
    def is_throttled(self) -> bool:
        """Return whether it answers, and is throttled by more than its power limit."""
        return self.is_up and any(
            ratio >= MIN_THROTTLED for reason, ratio in self.throttled.items() if reason != POWER_CAP
        )

    @property
    def is_paused(self) -> bool:
        """Return whether no kernel has run for some seconds, although its state is `working`."""
        return self.state == "working" and (self.idle_seconds or 0.0) > WORKS_WITHIN

    @property
    def problem(self) -> str:
        """Return its problem as words that follow its name; empty if it has none."""
        if not self.is_up:
            return "does not answer"
        if self.is_throttled:
            reason = next(reason for reason in self.throttled if reason != POWER_CAP)
            return f"is throttled: {reason.replace('_', ' ')}"
        if self.is_hot and self.temperature is not None:
            return f"is hot: {self.temperature:.0f} °C"
        return BAD_STATES.get(self.state, "") or self.past_problem

    @property
    def past_problem(self) -> str:
        """Return the problem of its last week, as words that follow its name; empty if it has none."""
        is_recurring = self.culprit_runs >= CULPRIT_RUNS
        return f"was the culprit in {self.culprit_runs} runs within a week" if is_recurring else ""


@dataclass(frozen=True)
class GpusReport:
    """All GPUs of a node, at a unix time."""

    at: float
    gpus: Sequence[GpuReport]


@dataclass(frozen=True)
class GpuProblem:
    """A GPU's problem that alerts, or will if it lasts. `gpu` and `uuid` are empty if the driver does not list it."""

    kind: str
    cause: str
    severity: str
    gpu: str
    uuid: str
    since: float
    """The unix time when it began."""
    age_seconds: float
    remaining_seconds: float
    """Seconds until it alerts if it lasts; 0 if it does."""
    sentence: str
    evidence: str
    advice: str


def report_gpus(values: Values, look: Look | None, now: float) -> Sequence[GpuReport]:
    """Return all GPUs that were ever seen, by index. `now` is unix time."""
    by_name = {name: values.by(f"rankscope_gpu_{name}", "gpu") for name in COLUMNS}
    names, holders = values.rows("rankscope_gpu_info", "gpu"), values.rows("rankscope_gpu_allocation_info", "gpu")
    states = {key[0]: key[1] for key in values.rows("rankscope_gpu_state_info", "gpu", "state")}
    hot, culprit_runs = _hot(values), values.by("rankscope_gpu_culprit_runs", "uuid")
    found = []
    for (index, uuid), is_up in values.by("rankscope_gpu_up", "gpu", "uuid").items():
        value = {name: known.get((index,)) for name, known in by_name.items()}
        last_busy, processes = value["last_busy_timestamp_seconds"], value["processes"]
        busy_ratio, throttled = _rates(look, uuid)
        report = GpuReport(
            index=index,
            uuid=uuid,
            name=names.get((index,), {}).get("name", ""),
            is_up=bool(is_up),
            state=states.get(index, ""),
            holder=holder_text(holders.get((index,), {})),
            processes=None if processes is None else int(processes),
            memory_used=value["memory_used_bytes"],
            memory_total=value["memory_total_bytes"],
            power=value["power_watts"],
            temperature=value["temperature_celsius"],
            is_hot=(index,) in hot,
            idle_seconds=None if last_busy is None else max(now - last_busy, 0.0),
            has_worked=bool(value["busy_seconds_total"]),
            busy_ratio=busy_ratio,
            throttled=throttled,
            culprit_runs=int(culprit_runs.get((uuid,), 0.0)),
        )
        found.append(report)
    return sorted(found, key=lambda one: int(one.index))


def _hot(values: Values) -> set[tuple[str, ...]]:
    """Return the GPUs that are close to their slowdown temperature."""
    temperatures = values.by("rankscope_gpu_temperature_celsius", "gpu")
    limits = values.by("rankscope_gpu_temperature_threshold_celsius", "gpu", "threshold")
    margins = values.by("rankscope_gpu_temperature_margin_celsius", "gpu")
    hot = {key for key, margin in margins.items() if margin <= HOT_WITHIN}
    for key, temperature in temperatures.items():
        limit = limits.get((*key, "slowdown"))
        if limit is not None and temperature >= limit - HOT_WITHIN:
            hot.add(key)
    return hot


def _rates(look: Look | None, uuid: str) -> tuple[float | None, Mapping[str, float]]:
    """Return the busy ratio of a GPU, and its throttled ratio by reason."""
    now = look.gpus.get(uuid) if look else None
    before = look.gpus_before.value.get(uuid) if look else None
    seconds = look.at - look.gpus_before.at if look else 0.0
    if now is None or before is None or seconds <= 0.0:
        return None, {}
    return _busy(now, before, seconds), _throttled(now, before, seconds)


def _busy(now: RankGpu, before: RankGpu, seconds: float) -> float | None:
    new, old = now.counters.busy, before.counters.busy
    return None if new is None or old is None else min(max(new - old, 0.0) / seconds, 1.0)


def _throttled(now: RankGpu, before: RankGpu, seconds: float) -> Mapping[str, float]:
    new, old = now.counters.throttled or {}, before.counters.throttled or {}
    ratios = {name: min((new[name] - old[name]) / seconds, 1.0) for name in new if name in old}
    return dict(sorted(((name, ratio) for name, ratio in ratios.items() if ratio > 0.0), key=lambda one: -one[1]))


def holder_text(labels: Mapping[str, str]) -> str:
    """Return the GPU's holder as text, from the known labels."""
    known = ", ".join(text.format(labels[name]) for name, text in HOLDER_TEXTS if labels.get(name))
    return known or labels.get("source", "")
