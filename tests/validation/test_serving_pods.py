"""The replay of inference pods: their series are right, waste alerts, and a service does not."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from validation.serving_pods import Pod, body, judge, pods

HELD, EVERY = 30e9, 57.0  # bytes; seconds between two samples
HOURS = 3600.0

Sample = tuple[float, float, float]


def samples(hours: float, busy_every: float | None = None, from_hour: float = 0.0) -> Iterable[Sample]:
    """Yield samples of a pod that holds memory from an hour on, and is busy for a sample every `busy_every` seconds."""
    for number in range(int(hours * HOURS / EVERY)):
        now = number * EVERY
        works = busy_every is not None and now >= from_hour * HOURS and now % busy_every < EVERY
        yield now, 0.5 * works, HELD if now >= from_hour * HOURS else 1e6


def alerts(pod: Pod) -> list[str]:
    (began,) = judge([pod]).values()
    return list(began.elements())


def test_a_service_that_works_sometimes_does_not_alert() -> None:
    pod = Pod("serves", list(samples(4, busy_every=HOURS)))
    assert alerts(pod) == []
    assert body({pod: Counter()}) == ["1 pods, 0.17 pod-days: 0 alerts, 0 a pod-week."]


def test_a_pod_that_takes_memory_and_never_works_alerts_once() -> None:
    assert alerts(Pod("never", list(samples(2, from_hour=0.5)))) == ["RankscopeGpuMemoryHeldIdle"]


def test_a_pod_without_a_process_alerts_as_an_unused_gpu() -> None:
    empty = [(now, busy, 0.0) for now, busy, _ in samples(1)]
    assert alerts(Pod("empty", [*empty, (HOURS, 0.0, HELD)])) == ["RankscopeGpuUnused"]


def test_a_gap_in_the_trace_is_not_an_exporter_that_is_down() -> None:
    every = list(samples(4, busy_every=HOURS))
    pod = Pod("gap", [one for one in every if not 1.2 * HOURS < one[0] < 2.2 * HOURS])
    assert alerts(pod) == []
    assert 2.9 * HOURS < pod.seconds < 3.2 * HOURS


def test_busy_seconds_only_grow_and_match_the_samples() -> None:
    pod = Pod("counts", list(samples(2, busy_every=HOURS)))
    (values,) = (one["values"] for one in pod.series() if "gpu_busy_seconds_total" in one["series"])
    busy = [float(word.partition("x")[0]) for word in values.split(" ")]
    assert busy == sorted(busy)
    assert busy[-1] == pytest.approx(2 * 0.5 * EVERY)


def test_a_trace_consists_of_all_files_in_the_directory(tmp_path: Path) -> None:
    head = "pod,unix_seconds,gpu_duty_cycle_percent,gpu_memory_used_bytes\n"
    for name in ("a", "b"):
        with gzip.open(tmp_path / f"{name}.csv.gz", "wt") as file:
            file.write(f"{head}{name},57,50.0,1000\n{name},0,0.0,1000\nonce_{name},0,0.0,1000\n")
    assert [pod.name for pod in pods(tmp_path)] == ["a", "b"]
    with pytest.raises(SystemExit, match=r"no \*.csv.gz with samples"):
        pods(tmp_path / "nothing")
