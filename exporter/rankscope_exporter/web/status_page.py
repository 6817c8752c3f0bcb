"""The landing page: GPUs and ranks of this machine at a glance, drawn from the same families as /metrics.

It has no history: a share is over the rank's whole life after start-up. For a window there are the dashboards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from rankscope import __version__
from rankscope.record.phases import PLANNED
from rankscope_exporter.ranks.metric import RANK_LABELS

Row = dict[str, str]
Labels = tuple[str, ...]

GIBIBYTE = 2**30

STYLE = """
:root{color-scheme:light dark;--line:#8884;--dim:#888;--bad:#d33;--good:#2a7}
body{font:15px/1.5 system-ui,sans-serif;max-width:88rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .4rem}
nav a{margin-right:1.2em}p{margin:.4rem 0;color:var(--dim)}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .7rem .3rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600;color:var(--dim)}td.n,th.n{text-align:right;padding-right:1.6rem;font-variant-numeric:tabular-nums}
.bad{color:var(--bad)}.good{color:var(--good)}.scroll{overflow-x:auto}
"""


class Values:
    """Looks values up in metric families by name and labels; a label that is not there is empty.

    Only what is asked for is made into samples, and once: a family of written lines parses them at each look.
    """

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = {_name(family): family for family in families}
        self._samples: dict[str, Sequence[Sample]] = {}

    def rows(self, name: str, *labels: str) -> dict[Labels, Mapping[str, str]]:
        """The label sets of a metric by the values of `labels`."""
        return {tuple(s.labels.get(label, "") for label in labels): s.labels for s in self._of(name)}

    def by(self, name: str, *labels: str) -> dict[Labels, float]:
        """The values of a metric by the values of `labels`."""
        return {tuple(s.labels.get(label, "") for label in labels): s.value for s in self._of(name)}

    def _of(self, name: str) -> Sequence[Sample]:
        if name not in self._samples:
            family = self._families.get(name)
            self._samples[name] = tuple(family.samples) if family else ()
        return self._samples[name]


def _name(family: Metric) -> str:
    """As its lines have it."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def render_status(families: Sequence[Metric], now: float | None = None) -> str:
    """The page as HTML. `now` is unix time."""
    values = Values(families)
    now = time.time() if now is None else now
    left_out = _left_out(values)
    no_rank = "No rank is shown." if left_out else "No rank has left a record on this machine."
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Rankscope exporter</title>
<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="5"><style>{STYLE}</style></head>
<body><h1>Rankscope exporter</h1><p>{escape(_headline(values))}</p>
<nav><a href="/metrics">/metrics</a><a href="/-/healthy">/-/healthy</a><a href="/-/ready">/-/ready</a></nav>
<h2>GPUs</h2>{_table(_gpus(values, now), "No GPU answers.")}
<h2>Ranks</h2>{_table(_ranks(values, now), no_rank)}{left_out}
</body></html>"""


def _headline(values: Values) -> str:
    driver = values.by("rankscope_exporter_nvml_up").get((), 0.0)
    seen = values.by("rankscope_exporter_gpus_seen").get((), 0.0)
    expected = values.by("rankscope_exporter_gpus_expected").get((), 0.0)
    gpus = f"{seen:.0f} of {expected:.0f} GPUs answer" if driver else "no NVIDIA driver answers"
    if values.by("rankscope_exporter_gpus_released").get(()):
        gpus = "the GPUs are released: POST /-/resume"
    return f"version {__version__} · {gpus}"


def _gpus(values: Values, now: float) -> list[Row]:
    used = values.by("rankscope_gpu_memory_used_bytes", "gpu")
    total = values.by("rankscope_gpu_memory_total_bytes", "gpu")
    power = values.by("rankscope_gpu_power_watts", "gpu")
    temperature = values.by("rankscope_gpu_temperature_celsius", "gpu")
    last_busy = values.by("rankscope_gpu_last_busy_timestamp_seconds", "gpu")
    busy_seconds = values.by("rankscope_gpu_busy_seconds_total", "gpu")
    processes = values.by("rankscope_gpu_processes", "gpu")
    names = values.rows("rankscope_gpu_info", "gpu")
    states = {key[:1]: key[1] for key in values.rows("rankscope_gpu_state_info", "gpu", "state")}
    holders = values.rows("rankscope_gpu_allocation_info", "gpu")
    return [
        {
            "GPU": key[0],
            "status": "answers" if up else "lost",
            "name": names.get(key, {}).get("name", ""),
            "state": states.get(key, ""),
            "held by": _holder(holders.get(key, {})),
            "memory GiB": f"{used[key] / GIBIBYTE:.1f} / {total[key] / GIBIBYTE:.0f}" if key in used else "",
            "power W": f"{power[key]:.0f}" if key in power else "",
            "°C": f"{temperature[key]:.0f}" if key in temperature else "",
            "processes": f"{processes[key]:.0f}" if key in processes else "",
            "last busy": _last_busy(now - last_busy[key], busy_seconds.get(key)) if key in last_busy else "",
        }
        for key, up in sorted(values.by("rankscope_gpu_up", "gpu").items(), key=lambda item: int(item[0][0]))
    ]


def _last_busy(age: float, busy_seconds: float | None) -> str:
    """Of a GPU that was never seen busy the age is that of the first look at it."""
    return _ago(age) if busy_seconds else f"not since {_ago(age)}"


def _holder(labels: Mapping[str, str]) -> str:
    """Who holds a GPU, as far as it is known."""
    return ", ".join(text.format(labels[name]) for name, text in HELD_BY if labels.get(name)) or labels.get(
        "source", ""
    )


def _ranks(values: Values, now: float) -> list[Row]:
    info = values.rows("rankscope_rank_info", *RANK_LABELS)
    steps = values.by("rankscope_rank_steps_total", *RANK_LABELS)
    passes = values.by("rankscope_rank_micro_steps_total", *RANK_LABELS)
    settings = values.rows("rankscope_rank_settings_info", *RANK_LABELS)
    gpus = {labels["uuid"]: key[0] for key, labels in values.rows("rankscope_gpu_info", "gpu").items()}
    since = values.by("rankscope_rank_phase_since_timestamp_seconds", *RANK_LABELS, "phase")
    phases = {key[:-1]: (key[-1], now - when) for key, when in since.items()}
    reasons = {key[:-1]: key[-1] for key in values.by("rankscope_rank_exit_info", *RANK_LABELS, "reason")}
    waits = _waits(values)
    saved = values.by("rankscope_rank_checkpoint_last_timestamp_seconds", *RANK_LABELS)
    return [
        {
            "run": key[0],
            "rank": key[1],
            "owner": labels.get("user") or key[2],
            "status": "alive" if key in phases else reasons.get(key, "ended"),
            "GPU": gpus.get(labels["uuid"], ""),
            "pid": labels["pid"],
            "steps": _steps(steps.get(key, 0.0), passes.get(key, 0.0), settings.get(key, {})),
            "the host is in": f"{phases[key][0]}, {_ago(phases[key][1])}" if key in phases else "",
            "waited for others": f"{waits[key][0]:.0%}" if key in waits else "",
            "by the clock of": waits[key][1] if key in waits else "",
            "last checkpoint": _ago(now - saved[key]) if key in saved else "",
        }
        for key, labels in sorted(info.items(), key=lambda item: (item[0][0], item[0][2], int(item[0][1])))
    ]


def _steps(steps: float, passes: float, settings: Mapping[str, str]) -> str:
    """How many; of a loop whose steps nothing marks, its backward passes."""
    if settings.get("step_marker") == "backward_pass":
        return f"{steps:.0f} (backward passes)"
    return f"{steps:.0f}" if steps or not passes else f"0 in {passes:.0f} backward passes"


def _waits(values: Values) -> dict[Labels, tuple[float, str]]:
    """Each rank's waiting for others as a share of its time after start-up, and by which clock: as the rules judge.

    By the device's, if that of every live rank of the group is measured here.
    """
    info = values.rows("rankscope_rank_info", *RANK_LABELS)
    groups = {key: (key[0], key[2], labels.get("group", "")) for key, labels in info.items()}
    host = _seconds(values, "rankscope_rank_phase_seconds_total")
    device = _seconds(values, "rankscope_rank_device_seconds_total")
    alive = values.rows("rankscope_rank_phase_since_timestamp_seconds", *RANK_LABELS)
    by_host = {groups[key] for key in alive if key in groups and key not in device}
    judged = {key: group not in by_host and key in device for key, group in groups.items() if key in host}
    shares = {key: _waited(host[key], device[key] if by_device else {}) for key, by_device in judged.items()}
    return {key: (share, CLOCKS[judged[key]]) for key, share in shares.items() if share is not None}


def _seconds(values: Values, name: str) -> dict[Labels, dict[str, float]]:
    """Of each rank by phase."""
    found: dict[Labels, dict[str, float]] = {}
    for (*key, phase), seconds in values.by(name, *RANK_LABELS, "phase").items():
        found.setdefault(tuple(key), {})[phase] = seconds
    return found


def _waited(host: Mapping[str, float], device: Mapping[str, float]) -> float | None:
    """As `rank:rankscope_phase:ratio`: planned phases are the host's, the rest is divided by the device's shares."""
    spent = sum(host.values()) - host.get("startup", 0.0)
    if not (spent and device):
        return host.get("collective_wait", 0.0) / spent if spent else None
    planned = sum(host.get(phase, 0.0) for phase in PLANNED if phase != "startup")
    measured = {phase: seconds for phase, seconds in device.items() if phase not in PLANNED}
    return (1 - planned / spent) * measured.get("collective_wait", 0.0) / (sum(measured.values()) or 1.0)


def _left_out(values: Values) -> str:
    """A line about the files that are not shown, if there are any."""
    files = values.by("rankscope_exporter_rank_files_skipped", "reason")
    reasons = ", ".join(f"{count:.0f} {LEFT_OUT.get(reason, reason)}" for (reason,), count in files.items() if count)
    return f"<p>Files left out: {escape(reasons)}.</p>" if reasons else ""


CLOCKS = ("the host", "the device")
LEFT_OUT = {
    "truncated": "cut short",
    "foreign": "no rank records",
    "version": "of another version of Rankscope",
    "symlink": "symbolic links",
    "unreadable": "unreadable",
    "duplicate": "about a rank that is shown",
    "unnamed": "of a run without a name",
    "impossible_rank": "with a rank beyond the world size",
    "future_start": "that begin in the future",
    "too_many_files": "past the limit of files",
    "too_many_ranks": "past the limit of ranks",
    "too_many_names": "past the limit of new names",
}
HELD_BY = (
    ("slurm_job_id", "job {}"),
    ("slurm_job_name", "{}"),
    ("k8s_pod", "pod {}"),
    ("run", "run {}"),
    ("rank", "rank {}"),
    ("user", "user {}"),
)
NUMBERS = frozenset({"memory GiB", "power W", "°C", "processes", "steps", "pid", "waited for others"})
# What is good or bad of the columns whose texts are words of ours.
WORDS = {
    "status": {"good": {"answers", "alive"}, "bad": {"lost", "exception", "killed"}},
    "state": {"good": {"working"}, "bad": {"suspected_hang", "memory_held_by_dead"}},
}


def _table(rows: Sequence[Row], empty: str) -> str:
    if not rows:
        return f"<p>{escape(empty)}</p>"
    head = "".join(f'<th class="{"n" if name in NUMBERS else ""}">{escape(name)}</th>' for name in rows[0])
    body = "".join("<tr>" + "".join(_cell(*item) for item in row.items()) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(name: str, text: str) -> str:
    kinds = [kind for kind, words in WORDS.get(name, {}).items() if text in words]
    kind = kinds[0] if kinds else "n" if name in NUMBERS else ""
    return f'<td class="{kind}">{escape(text)}</td>'


def _ago(seconds: float) -> str:
    """An age as a person says it."""
    for limit, unit, size in ((1.0, "", 0), (120, "s", 1), (7200, "min", 60)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago" if size else "now"
    return f"{seconds / 3600:.0f} h ago"
