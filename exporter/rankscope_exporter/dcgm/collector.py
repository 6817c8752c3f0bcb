"""`--metrics.dcgm`: what the sampler has read, once more under dcgm-exporter's names. Asks no driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric

from rankscope_exporter.collectors import allocation, gpu, memory, mig
from rankscope_exporter.collectors.gpu import Identity
from rankscope_exporter.collectors.xid import XidEvents
from rankscope_exporter.dcgm import xid
from rankscope_exporter.dcgm.labels import NO_INSTANCE, NOBODY, holder_values, identity_values, instance_values
from rankscope_exporter.dcgm.metrics import COUNTS, METRICS, WHOLE_GPU, ByInstance, Framebuffers
from rankscope_exporter.dcgm.recent import Recent
from rankscope_exporter.families import BareCounterMetricFamily, GaugeMetricFamily
from rankscope_exporter.nvml.mig import MigInstance
from rankscope_exporter.source import Gpu, GpuSource, Readings

NEEDED = {metric.collector for metric in METRICS} | {gpu.SOURCE.name, mig.SOURCE.name, allocation.SOURCE.name}

Known = dict[str, Any]
"""What there is of one GPU, by collector; what there is not has no entry."""


class SampledGpus(Readings, XidEvents, Protocol):
    """The sampler, as far as this needs it."""


class Averages:
    """The sources that are on, with those averaged on the side that dcgm-exporter has as gauges."""

    def __init__(self, sources: Iterable[GpuSource[Any]]) -> None:
        plain = list(sources)
        self._recent = {source.name: Recent(source, COUNTS[source.name]) for source in plain if source.name in COUNTS}
        self.sources = [self._recent[s.name].source if s.name in self._recent else s for s in plain]
        """What the sampler is to read, in the order given."""

    def of(self, source: GpuSource[Any], gpu: Gpu, reading: Any) -> Any:
        """The averages in the place of the reading, where there are any."""
        recent = self._recent.get(source.name)
        return recent.rates(gpu) if recent else reading


class DcgmCollector:
    """A row for each GPU, or for each MIG instance where the quantity is told by instance."""

    name = "dcgm"
    help = "dcgm-exporter's default counters"

    def __init__(self, averages: Averages, sampled: SampledGpus) -> None:
        self._averages = averages
        self._sources = [source for source in averages.sources if source.name in NEEDED]
        self._sampled = sampled
        # What a GPU is stays true when it is lost, and XID 79 is the last that one hears of it.
        self._identities: dict[str, Identity] = {}

    def collect(self) -> Iterable[Metric]:
        """The metrics that any of the GPUs has."""
        known = self._known()
        families = [(metric, metric.family()) for metric in METRICS]
        for device, of in known.items():
            rows = _Rows(device, of)
            for metric, family in families:
                if metric.collector in of:
                    rows.add(family, metric.value(of[metric.collector]))
        return [family for family in (*(family for _, family in families), self._xids(known)) if family.rows]

    def _known(self) -> Mapping[Gpu, Known]:
        """Of the GPUs that answer."""
        known: dict[Gpu, Known] = {}
        for source in self._sources:
            for device, reading in self._sampled.readings(source).items():
                if reading is not None:
                    known.setdefault(device, {})[source.name] = self._averages.of(source, device, reading)
        answering = {device: _with_framebuffers(of) for device, of in known.items() if gpu.SOURCE.name in of}
        self._identities |= {device.uuid: of[gpu.SOURCE.name] for device, of in answering.items()}
        return answering

    def _xids(self, known: Mapping[Gpu, Known]) -> GaugeMetricFamily:
        """Also of a GPU that is lost."""
        family, times = xid.family(), self._sampled.last_xids()
        for device in self._sampled.xids():
            if identity := self._identities.get(device.uuid):
                code = xid.last_code(times.get(device, {}))
                holders = holder_values(known.get(device, {}).get(allocation.SOURCE.name))
                labels = (*identity_values(device, identity), *NO_INSTANCE, *holders, *xid.labels_of(code))
                family.add_metric(labels, code)
        return family


class _Rows:
    """The labels of one GPU's rows."""

    def __init__(self, device: Gpu, of: Known) -> None:
        self._identity = identity_values(device, of[gpu.SOURCE.name])
        self._instances = instance_values(_instances(of))
        self._holders = holder_values(of.get(allocation.SOURCE.name))

    def add(self, family: GaugeMetricFamily | BareCounterMetricFamily, values: ByInstance) -> None:
        """A row a value. Of an instance nobody says who holds it, only of the whole GPU."""
        for instance, value in values.items():
            if value is None:
                continue
            if instance == WHOLE_GPU:
                family.add_metric((*self._identity, *NO_INSTANCE, *self._holders), value)
            elif instance in self._instances:
                family.add_metric((*self._identity, *self._instances[instance], *NOBODY), value)


def _instances(of: Known) -> list[MigInstance]:
    return list(of.get(mig.SOURCE.name, ()))


def _with_framebuffers(of: Known) -> Known:
    """Memory by instance; that of a whole GPU which is split would count it twice."""
    if memory.SOURCE.name not in of:
        return of
    split = {str(i.gpu_instance): i.memory for i in _instances(of) if i.memory}
    whole = of[memory.SOURCE.name].device
    framebuffers: Framebuffers = split or ({WHOLE_GPU: whole} if whole else {})
    return of | {memory.SOURCE.name: framebuffers}
