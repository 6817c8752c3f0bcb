"""`--metrics.dcgm`: export the sampler's readings under dcgm-exporter's names. Makes no driver calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

from rankscope_exporter.dcgm import xid
from rankscope_exporter.dcgm.labels import NO_HOLDER, NO_INSTANCE, holder_values, identity_values, instance_values
from rankscope_exporter.dcgm.metrics import COUNTS, METRICS, WHOLE_GPU, CollectorReadings, Framebuffers
from rankscope_exporter.dcgm.recent import Amounts, averaging
from rankscope_exporter.exposition.metric import Declaration, Values
from rankscope_exporter.gpu.collector import Gpu, GpuCollector
from rankscope_exporter.gpu.collectors import allocation, gpu, memory, mig
from rankscope_exporter.gpu.collectors.gpu import Identity
from rankscope_exporter.gpu.nvml.mig import MigInstance
from rankscope_exporter.gpu.sampler import Sampler

REQUIRED = {metric.source for metric in METRICS} | {gpu.COLLECTOR.name, mig.COLLECTOR.name, allocation.COLLECTOR.name}

LabeledValues = dict[tuple[str, ...], float]
"""Numbers by the values of LABELS and of the metric's own labels."""


class Averages:
    """Enabled collectors, wrapped to compute averages where dcgm-exporter has a gauge."""

    def __init__(self, collectors: Iterable[GpuCollector[Any]]) -> None:
        self._rates: dict[str, dict[str, Amounts]] = {name: {} for name in COUNTS}
        self.collectors = [
            averaging(one, COUNTS[one.name], self._rates[one.name]) if one.name in COUNTS else one for one in collectors
        ]
        """The collectors that the sampler reads, in the given order."""

    def averaged(self, collector: GpuCollector[Any], gpu: Gpu, reading: Any) -> Any:
        """Return the collector's averages if it has any, the reading otherwise."""
        return self._rates[collector.name].get(gpu.uuid, {}) if collector.name in COUNTS else reading


class DcgmCollector:
    """One sample per GPU, or per MIG instance where the driver reports the quantity by instance."""

    name = "dcgm"
    help = "dcgm-exporter's default counters"

    def __init__(self, averages: Averages, sampled: Sampler) -> None:
        self._averages = averages
        self._collectors = [collector for collector in averages.collectors if collector.name in REQUIRED]
        self._sampled = sampled
        # A lost GPU keeps its identity; XID 79 is its last event.
        self._identities: dict[str, Identity] = {}

    def collect(self) -> Iterable[Metric]:
        """Return the metrics that at least one GPU has."""
        readings_by_gpu = self._readings_by_gpu()
        values: dict[Declaration, LabeledValues] = {metric: {} for metric in METRICS}
        for device, readings in readings_by_gpu.items():
            labels = _labels(device, readings)
            for metric in METRICS:
                values[metric] |= _labeled(metric.values(readings), labels)
        values[xid.METRIC] = self._xids(readings_by_gpu)
        return [metric.family(labeled) for metric, labeled in values.items() if labeled]

    def _readings_by_gpu(self) -> Mapping[Gpu, CollectorReadings]:
        """Return the readings of each GPU that answers."""
        found: dict[Gpu, dict[str, Any]] = {}
        for collector in self._collectors:
            for device, reading in self._sampled.values(collector).items():
                if reading is not None:
                    found.setdefault(device, {})[collector.name] = self._averages.averaged(collector, device, reading)
        answering = {device: _with_framebuffers(r) for device, r in found.items() if gpu.COLLECTOR.name in r}
        self._identities |= {device.uuid: readings[gpu.COLLECTOR.name] for device, readings in answering.items()}
        return answering

    def _xids(self, readings_by_gpu: Mapping[Gpu, CollectorReadings]) -> LabeledValues:
        """Return the last XID error of each GPU, including lost GPUs."""
        found: LabeledValues = {}
        for device, xids in self._sampled.xids().items():
            identity = self._identities.get(device.uuid)
            last = xid.METRIC.values(xids)
            if identity and isinstance(last, Mapping):
                holders = holder_values(readings_by_gpu.get(device, {}).get(allocation.COLLECTOR.name))
                labels = (*identity_values(device, identity), *NO_INSTANCE, *holders)
                found |= {(*labels, *error): code for error, code in last.items() if code is not None}
        return found


def _labels(device: Gpu, readings: CollectorReadings) -> Mapping[str, tuple[str, ...]]:
    """Return the values of LABELS by instance. Holders are known only for the whole GPU, not for an instance."""
    identity = identity_values(device, readings[gpu.COLLECTOR.name])
    holders = holder_values(readings.get(allocation.COLLECTOR.name))
    by_instance = {name: (*identity, *of, *NO_HOLDER) for name, of in instance_values(_instances(readings)).items()}
    return {**by_instance, WHOLE_GPU: (*identity, *NO_INSTANCE, *holders)}


def _labeled(values: Values, labels: Mapping[str, tuple[str, ...]]) -> LabeledValues:
    """Return the known values by label values."""
    by_instance = values if isinstance(values, Mapping) else {WHOLE_GPU: values}
    known = {name: value for name, value in by_instance.items() if value is not None}
    return {labels[str(name)]: value for name, value in known.items() if name in labels}


def _instances(readings: CollectorReadings) -> list[MigInstance]:
    return list(readings.get(mig.COLLECTOR.name, ()))


def _with_framebuffers(readings: CollectorReadings) -> CollectorReadings:
    """Replace the memory reading by memory per instance; for a split GPU, the whole GPU would count twice."""
    if memory.COLLECTOR.name not in readings:
        return readings
    split = {str(i.gpu_instance): i.memory for i in _instances(readings) if i.memory}
    whole = readings[memory.COLLECTOR.name].device
    framebuffers: Framebuffers = split or ({WHOLE_GPU: whole} if whole else {})
    return readings | {memory.COLLECTOR.name: framebuffers}
