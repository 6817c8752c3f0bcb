"""`--metrics.dcgm`: what the sampler has read, once more under dcgm-exporter's names. Asks no driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric

from rankscope_exporter.dcgm import xid
from rankscope_exporter.dcgm.labels import NO_INSTANCE, NOBODY, holder_values, identity_values, instance_values
from rankscope_exporter.dcgm.metrics import COUNTS, METRICS, WHOLE_GPU, ByInstance, Framebuffers
from rankscope_exporter.dcgm.recent import Recent
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.gpu.collectors import allocation, gpu, memory, mig
from rankscope_exporter.gpu.collectors.gpu import Identity
from rankscope_exporter.gpu.collectors.xid import XidEvents
from rankscope_exporter.gpu.nvml.mig import MigInstance
from rankscope_exporter.gpu.source import Gpu, GpuSource

NEEDED = {metric.collector for metric in METRICS} | {gpu.SOURCE.name, mig.SOURCE.name, allocation.SOURCE.name}

Values = dict[tuple[str, ...], float]
"""By the values of LABELS, and of what labels there are beside them."""
Known = dict[str, Any]
"""What there is of one GPU, by collector; what there is not has no entry."""


class SampledGpus(XidEvents, Protocol):
    """The sampler, as far as this needs it."""

    def readings(self, source: GpuSource[Any]) -> Mapping[Gpu, Any]:
        """The source's last reading of every GPU ever seen; None where there is none."""


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
        values: dict[Declaration, Values] = {metric: {} for metric in METRICS}
        for device, of in known.items():
            labels = _Labels(device, of)
            for metric in METRICS:
                if metric.collector in of:
                    values[metric] |= labels.of(metric.value(of[metric.collector]))
        values[xid.METRIC] = self._xids(known)
        return [metric.family(found) for metric, found in values.items() if found]

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

    def _xids(self, known: Mapping[Gpu, Known]) -> Values:
        """Also of a GPU that is lost."""
        found: Values = {}
        for device, xids in self._sampled.xids().items():
            identity = self._identities.get(device.uuid)
            if identity and xids.counts is not None:
                code = xid.last_code(xids.last)
                holders = holder_values(known.get(device, {}).get(allocation.SOURCE.name))
                found[(*identity_values(device, identity), *NO_INSTANCE, *holders, *xid.labels_of(code))] = code
        return found


class _Labels:
    """The labels of one GPU's values."""

    def __init__(self, device: Gpu, of: Known) -> None:
        self._identity = identity_values(device, of[gpu.SOURCE.name])
        self._instances = instance_values(_instances(of))
        self._holders = holder_values(of.get(allocation.SOURCE.name))

    def of(self, values: ByInstance) -> Values:
        """The values that are known, by their labels. Of an instance nobody says who holds it, only of the whole."""
        found: Values = {}
        for instance, value in values.items():
            if value is None:
                continue
            if instance == WHOLE_GPU:
                found[(*self._identity, *NO_INSTANCE, *self._holders)] = value
            elif instance in self._instances:
                found[(*self._identity, *self._instances[instance], *NOBODY)] = value
        return found


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
