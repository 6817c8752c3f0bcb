"""Count the alerts about inference pods, which legitimately hold GPU memory between requests.

    python -m validation.serving_pods --trace DIR --save

DIR has one or more *.csv.gz with a line for each sample of a pod: pod, unix_seconds, gpu_duty_cycle_percent and
gpu_memory_used_bytes, as in the inference pods of alibaba/clusterdata (v2026 GenAI). Each pod is a node with one GPU
and without a rank. Prometheus' own engine (promtool) evaluates the shipped rules each 15 s.

Where the trace has no data, the values that alert most are used: work between two samples is missed, and the GPU has as
much memory as the pod ever uses, so that a twentieth of that is held memory. A GPU with empty memory is allocated
without a process. Where the trace has no sample for five minutes, the exporter shows no GPU.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from testing import promtool, report
from validation.month.steps import Array

from rankscope_exporter.gpu.allocation import idleness
from rankscope_exporter.gpu.allocation.idleness import UnusedMemory

SCRAPE = float(promtool.INTERVAL)
ABSENT = np.nan
"""No sample at this scrape."""
BEGINNING = (
    'sum by (alertname, instance) (count_over_time((ALERTS{alertstate="firing"}'
    ' unless ALERTS{alertstate="firing"} offset %(scrape)ds)[%(seconds)ds:%(scrape)ds]))'
)
"""The number of times that each alert began to fire."""
FOUND = re.compile(r'\{alertname="(\w+)", instance="([^"]+)"\} ([\d.E+]+)')
HELD_FOR = 300.0  # seconds for which a sample is valid
AT_ONCE = 100  # pods in one Prometheus
WEEK = 7 * 86400.0
BOUND = 1.0  # alerts a pod-week


class Pod:
    """An exporter's series of a pod with these samples: time, busy ratio and memory in use, in order of time."""

    def __init__(self, name: str, samples: Sequence[tuple[float, float, float]]) -> None:
        self.name = name
        times, self._busy, self._memory = np.array(sorted(samples)).T
        self._samples = times - times[0]
        self._scrapes = np.arange(0.0, self._samples[-1] + SCRAPE, SCRAPE)
        self._latest = np.searchsorted(self._samples, self._scrapes, side="right") - 1

    def __len__(self) -> int:
        return len(self._scrapes)

    @property
    def seconds(self) -> float:
        """The observed seconds."""
        return float(np.minimum(np.diff(self._samples), HELD_FOR).sum())

    def series(self) -> Iterator[dict[str, str]]:
        """Yield the series in promtool's notation."""
        target = f'job="rankscope",instance="{self.name}"'
        always = np.ones(len(self))
        yield _input_series(f"up{{{target}}}", always)
        yield _input_series(f"rankscope_exporter_build_info{{{target}}}", always)
        yield _input_series(f"rankscope_exporter_time_seconds{{{target}}}", self._scrapes)
        is_known = self._scrapes - self._samples[self._latest] < HELD_FOR
        for name, labels, values in self._gpu():
            series = f'rankscope_gpu_{name}{{{target},gpu="0",uuid="GPU-{self.name}"{labels}}}'
            yield _input_series(series, np.where(is_known, values, ABSENT))

    def _gpu(self) -> Iterator[tuple[str, str, Array]]:
        memory, always = self._memory[self._latest], np.ones(len(self))
        yield "info", f',node="{self.name}"', always
        yield "up", "", always
        yield "busy_seconds_total", "", self._busy_seconds()
        yield "last_busy_timestamp_seconds", "", self._last_busy()
        yield "memory_used_bytes", "", memory
        yield "memory_total_bytes", "", self._memory.max() * always
        yield "processes", "", (memory > 0).astype(float)
        for what, since in self._unused_since(memory).items():
            yield "memory_unused_since_timestamp_seconds", f',since="{what}"', since
        for state, is_so in (("allocated_no_process", memory == 0), ("process_no_work", memory > 0)):
            yield "state_info", f',state="{state}"', np.where(is_so, 1.0, ABSENT)

    def _busy_seconds(self) -> Array:
        lasts = np.minimum(np.diff(self._samples, append=self._samples[-1]), HELD_FOR)
        before = np.concatenate([[0.0], np.cumsum(self._busy * lasts)])[self._latest]
        since = np.minimum(self._scrapes - self._samples[self._latest], lasts[self._latest])
        return np.asarray(before + self._busy[self._latest] * since)

    def _unused_since(self, memory: Array) -> dict[str, Array]:
        """Return the exporter's own times since which memory is in use without work, by what happened then."""
        exporter, idle = UnusedMemory(), self._scrapes - self._last_busy()
        ratios = memory / self._memory.max() if self._memory.max() else memory
        moments = zip(self._scrapes.tolist(), ratios.tolist(), idle.tolist(), strict=True)
        found = [exporter.update(at, ratio, False, idle_for) for at, ratio, idle_for in moments]
        return {
            what: np.array([one.at if one and one.what == what else ABSENT for one in found]) for what in idleness.SINCE
        }

    def _last_busy(self) -> Array:
        """Return the last scrape with work. Until there was work, an exporter shows its own start."""
        return np.maximum.accumulate(np.where(self._busy[self._latest] > 0, self._scrapes, 0.0))


def pods(trace: Path) -> list[Pod]:
    """Return the pods with at least two samples. Raises SystemExit if there are none."""
    samples = defaultdict(list)
    for path in sorted(trace.glob("*.csv.gz")):
        with gzip.open(path, "rt", newline="") as file:
            for row in csv.DictReader(file):
                busy, memory = float(row["gpu_duty_cycle_percent"]) / 100, float(row["gpu_memory_used_bytes"])
                samples[row["pod"]].append((float(row["unix_seconds"]), busy, memory))
    found = [Pod(name, of) for name, of in samples.items() if len(of) > 1]
    if not found:
        raise SystemExit(f"serving_pods: {trace}: no *.csv.gz with samples of pods")
    return found


def _input_series(name: str, values: Array) -> dict[str, str]:
    """Return a series in promtool's notation, in which `x` repeats a sample."""
    words = ("_" if np.isnan(value) else f"{value:.9g}" for value in values.tolist())
    runs = ((word, len([*same]) - 1) for word, same in groupby(words))
    return {
        "series": name,
        "values": " ".join(f"_x{more + 1}" if word == "_" else f"{word}x{more}" for word, more in runs),
    }


def judge(found: Sequence[Pod]) -> dict[Pod, Counter[str]]:
    """Return how often each alert began, by pod. Raises RuntimeError if promtool fails."""
    began: dict[Pod, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        for first in range(0, len(found), AT_ONCE):
            began |= _judge_together(found[first : first + AT_ONCE], Path(name) / "test.json")
    return began


def _judge_together(found: Sequence[Pod], path: Path) -> dict[Pod, Counter[str]]:
    seconds = int(SCRAPE) * (max(map(len, found)) - 1)
    question = BEGINNING % {"scrape": SCRAPE, "seconds": seconds}
    test = {
        "interval": f"{SCRAPE:.0f}s",
        "input_series": [line for pod in found for line in pod.series()],
        "promql_expr_test": [{"expr": question, "eval_time": f"{seconds}s", "exp_samples": []}],
    }
    output = promtool.complaint(test, path)
    if output and "got:" not in output:
        raise RuntimeError(f"promtool: {output[:2000]}")
    by_name = {pod.name: Counter[str]() for pod in found}
    for alert, name, times in FOUND.findall(output.partition("got:")[2]):
        by_name[name][alert] = round(float(times))
    return {pod: by_name[pod.name] for pod in found}


def rate(began: dict[Pod, Counter[str]]) -> float:
    """Return the alerts in a week of one pod."""
    return sum(one.total() for one in began.values()) * WEEK / sum(pod.seconds for pod in began)


def body(began: dict[Pod, Counter[str]]) -> list[str]:
    alerts = sum(began.values(), Counter[str]())
    in_pods = Counter(name for one in began.values() for name in one)
    days = sum(pod.seconds for pod in began) / 86400
    summary = f"{len(began)} pods, {days:.2g} pod-days: {alerts.total()} alerts, {rate(began):.2g} a pod-week."
    rows = [(name, count, in_pods[name]) for name, count in alerts.most_common()]
    return [summary, *([report.table(("alert", "how often", "pods"), rows)] if rows else [])]


def main() -> int:
    """Judge and report. Return 1 if there are more alerts than BOUND."""
    parser = report.parser(__doc__)
    parser.add_argument("--trace", type=Path, required=True, metavar="DIR", help="directory of the *.csv.gz")
    options = parser.parse_args()
    began = judge(pods(options.trace))
    figures = {pod.name: dict(of) for pod, of in began.items() if of}
    page = ("serving_pods", "Inference pods rarely alert", __doc__, f"{BOUND:g} alert a pod-week")
    report.Report(*page, body(began), figures).publish(options.save)
    return int(rate(began) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
