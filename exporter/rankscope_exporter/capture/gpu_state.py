"""The state of the node's GPUs as the exporter has just read it: the content of `nvidia-smi -q`.

The driver is not called: a driver that hangs does not delay a capture. What the collectors read is shown, with what has
changed since the reading before.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.samples import Sample

from rankscope.record.quantities import utc
from rankscope_exporter.capture.source import UnavailableError, cut
from rankscope_exporter.gpu.collector import GPU_LABELS, Gpu, GpuCollector
from rankscope_exporter.gpu.collectors import allocation, process, processes
from rankscope_exporter.gpu.collectors.processes import Processes
from rankscope_exporter.gpu.states import Reading, Snapshot
from rankscope_exporter.gpu.xid_watcher import Xids

PAUSE = 2.0
"""Seconds between two readings, which show what changes."""
BYTES = 256 * 1024
XID_HOURS = 24.0
APART = frozenset({allocation.COLLECTOR.name, process.COLLECTOR.name, processes.COLLECTOR.name})
"""Collectors that are not shown as values: they name other users' jobs and processes."""
UNITS = {
    "bytes": (2**30, "GiB"),
    "hertz": (1e6, "MHz"),
    "celsius": (1.0, "°C"),
    "watts": (1.0, "W"),
    "joules": (1.0, "J"),
    "seconds": (1.0, "s"),
    "ratio": (0.01, "%"),
}
NAME = re.compile(rf"rankscope_gpu_(.+?)(?:_({'|'.join(UNITS)}))?(_total)?")


class Gpus(Protocol):
    """The GPUs of this node, such as a Sampler."""

    def latest(self) -> Snapshot:
        """Return the last reading of every GPU; none while the handles are released."""

    def xids(self) -> Mapping[Gpu, Xids]:
        """Return the XID events of every GPU, also of lost ones."""


def describe_gpus(gpus: Gpus, of_run: Collection[str], pids: Collection[int], *, pause: float = PAUSE) -> str:
    """Return the state of all GPUs, those of the run first. Takes 2 s and 256 KiB at most. Raise UnavailableError.

    `of_run` are the indices of the run's GPUs, and `pids` its ranks' processes in the driver's pid namespace, the
    host's. Of other processes only the number and the memory are shown.
    """
    before = gpus.latest()
    time.sleep(pause)
    readings, earlier, xids = gpus.latest().gpus, dict(before.gpus), gpus.xids()
    if not readings:
        raise UnavailableError("the exporter reads no GPU: there is none, or its handles are released")
    ordered = sorted(readings, key=lambda one: (str(one[0].index) not in of_run, one[0].index))
    lines: list[str] = []
    for gpu, reading in ordered:
        lines.append(f"GPU {gpu.index} {gpu.uuid}{' (of the run)' if str(gpu.index) in of_run else ''}")
        lines += [f"  {line}" for line in _xids(xids.get(gpu), time.time())]
        if reading is None:
            lines += ["  does not answer: it is lost, or a call of the driver does not return", ""]
            continue
        lines += [f"  {line}" for line in _processes(reading, pids)]
        lines += [f"  {line}" for line in _values(gpu, reading, earlier.get(gpu))]
        lines.append("")
    return cut("\n".join(lines), BYTES)


def _xids(xids: Xids | None, now: float) -> Iterator[str]:
    """Yield the XID errors of the last hours, the newest first."""
    if xids is None or xids.counts is None:
        yield "XID errors: the driver reports none to the exporter"
        return
    recent = sorted(xids.last.items(), key=lambda one: -one[1])
    shown = [(code, at) for code, at in recent if now - at < XID_HOURS * 3600.0]
    for code, at in shown:
        yield f"XID {code}: {xids.counts.get(code, 0)} since the exporter started, the last at {utc(at)}"
    if not shown:
        yield f"XID errors: none in the last {XID_HOURS:.0f} h, or since the exporter started"


def _processes(reading: Reading, pids: Collection[int]) -> Iterator[str]:
    found = reading.values.get(processes.COLLECTOR)
    if not isinstance(found, Mapping):
        return
    own: Processes = {pid: found[pid] for pid in sorted(found) if pid in pids}
    others: Processes = {pid: size for pid, size in found.items() if pid not in pids}
    yield f"processes: {len(own)} of the run's ranks, {len(others)} others{_memory(processes.total(others))}"
    yield from (f"  process {pid}{_memory(size)}" for pid, size in own.items())


def _memory(size: int | None) -> str:
    return f", {size / 2**30:.2f} GiB" if size else ""


def _values(gpu: Gpu, reading: Reading, before: Reading | None) -> Iterator[str]:
    """Yield the metrics of each collector, one a line, with the increase of counters since another reading."""
    for collector, value in reading.values.items():
        if collector.name in APART:
            continue
        if isinstance(value, Exception):
            yield f"{collector.name}: not read: {value!r}"
            continue
        old = before.values.get(collector) if before else None
        earlier = {} if isinstance(old, Exception) else _samples(collector, gpu, old)
        seconds = reading.taken - before.taken if before else 0.0
        for name, samples in _samples(collector, gpu, value).items():
            yield from _line(name, samples, {_labels(one): one.value for one in earlier.get(name, ())}, seconds)


def _samples(collector: GpuCollector[Any], gpu: Gpu, value: object) -> dict[str, list[Sample]]:
    return {
        family.samples[0].name: list(family.samples) for family in collector.families({gpu: value}) if family.samples
    }


def _line(name: str, samples: list[Sample], before: Mapping[str, float], seconds: float) -> Iterator[str]:
    """Yield a metric in one line. Of counters with labels, only those that have counted are shown."""
    match = NAME.fullmatch(name)
    if not match:
        return
    title = match[1].replace("_", " ")
    if title.endswith(" info"):
        yield from (f"{title.removesuffix(' info')}: {_text(sample)}" for sample in samples)
        return
    texts = []
    for sample in samples:
        label, value = _labels(sample), _value(sample.value, match[2], title)
        increase = sample.value - before.get(label, sample.value) if match[3] else 0.0
        more = f" (+{_value(increase, match[2])} in {seconds:.1f} s)" if increase > 0.0 and seconds > 0.0 else ""
        if sample.value or not label or not match[3]:
            texts.append(f"{label} {value}{more}".strip())
    yield f"{title}: {', '.join(texts) or 'none'}"


def _labels(sample: Sample) -> str:
    return " ".join(value for name, value in sample.labels.items() if value and name not in GPU_LABELS)


def _text(sample: Sample) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in sample.labels.items() if value and name not in GPU_LABELS
    )


def _value(value: float, unit: str | None, title: str = "") -> str:
    if title.endswith(" timestamp"):
        return utc(value)
    if unit is None:
        return f"{value:.12g}"
    divisor, name = UNITS[unit]
    text = f"{value / divisor:.2f}".rstrip("0").rstrip(".")
    return f"{text}%" if name == "%" else f"{text} {name}"
