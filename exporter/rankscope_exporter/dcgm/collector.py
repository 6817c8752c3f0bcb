"""`--metrics.dcgm`: what the sampler has read, once more under dcgm-exporter's names. Asks no driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric

from rankscope_exporter.dcgm import xid
from rankscope_exporter.dcgm.labels import NO_INSTANCE, NOBODY, holder_values, identity_values, instance_values
from rankscope_exporter.dcgm.metrics import COUNTS, METRICS, WHOLE_GPU, Framebuffers, Known
from rankscope_exporter.dcgm.recent import Recent
from rankscope_exporter.exposition.metric import Declaration, Values
from rankscope_exporter.gpu.collector import Gpu, GpuCollector
from rankscope_exporter.gpu.collectors import allocation, gpu, memory, mig
from rankscope_exporter.gpu.collectors.gpu import Identity
from rankscope_exporter.gpu.collectors.xid import XidEvents
from rankscope_exporter.gpu.nvml.mig import MigInstance

NEEDED = {metric.source for metric in METRICS} | {gpu.COLLECTOR.name, mig.COLLECTOR.name, allocation.COLLECTOR.name}

Found = dict[tuple[str, ...], float]
"""Numbers by the values of LABELS, and of what labels there are beside them."""


class SampledGpus(XidEvents, Protocol):
    """The sampler, as far as this needs it."""

    def readings(self, collector: GpuCollector[Any]) -> Mapping[Gpu, Any]:
        """The collector's last reading of every GPU ever seen; None where there is none."""


class Averages:
    """The collectors that are on, with those averaged on the side that dcgm-exporter has as gauges."""

    def __init__(self, collectors: Iterable[GpuCollector[Any]]) -> None:
        plain = list(collectors)
        self._recent = {
            collector.name: Recent(collector, COUNTS[collector.name]) for collector in plain if collector.name in COUNTS
        }
        self.collectors = [self._recent[s.name].collector if s.name in self._recent else s for s in plain]
        """What the sampler is to read, in the order given."""

    def of(self, collector: GpuCollector[Any], gpu: Gpu, reading: Any) -> Any:
        """The averages instead of the reading, where there are any."""
        recent = self._recent.get(collector.name)
        return recent.rates(gpu) if recent else reading


class DcgmCollector:
    """A row for each GPU, or for each MIG instance where the quantity is told by instance."""

    name = "dcgm"
    help = "dcgm-exporter's default counters"

    def __init__(self, averages: Averages, sampled: SampledGpus) -> None:
        self._averages = averages
        self._collectors = [collector for collector in averages.collectors if collector.name in NEEDED]
        self._sampled = sampled
        # What a GPU is stays true when it is lost, and XID 79 is the last that one hears of it.
        self._identities: dict[str, Identity] = {}

    def collect(self) -> Iterable[Metric]:
        """The metrics that any of the GPUs has."""
        known = self._known()
        values: dict[Declaration, Found] = {metric: {} for metric in METRICS}
        for device, of in known.items():
            labels = _Labels(device, of)
            for metric in METRICS:
                values[metric] |= labels.of(metric.values(of))
        values[xid.METRIC] = self._xids(known)
        return [metric.family(found) for metric, found in values.items() if found]

    def _known(self) -> Mapping[Gpu, Known]:
        """What there is of each GPU that answers."""
        known: dict[Gpu, dict[str, Any]] = {}
        for collector in self._collectors:
            for device, reading in self._sampled.readings(collector).items():
                if reading is not None:
                    known.setdefault(device, {})[collector.name] = self._averages.of(collector, device, reading)
        answering = {device: _with_framebuffers(of) for device, of in known.items() if gpu.COLLECTOR.name in of}
        self._identities |= {device.uuid: of[gpu.COLLECTOR.name] for device, of in answering.items()}
        return answering

    def _xids(self, known: Mapping[Gpu, Known]) -> Found:
        """The last XID error of each GPU, lost ones included."""
        found: Found = {}
        for device, xids in self._sampled.xids().items():
            identity = self._identities.get(device.uuid)
            last = xid.METRIC.values(xids)
            if identity and isinstance(last, Mapping):
                holders = holder_values(known.get(device, {}).get(allocation.COLLECTOR.name))
                labels = (*identity_values(device, identity), *NO_INSTANCE, *holders)
                found |= {(*labels, *error): code for error, code in last.items() if code is not None}
        return found


class _Labels:
    """The labels of one GPU's values."""

    def __init__(self, device: Gpu, of: Known) -> None:
        self._identity = identity_values(device, of[gpu.COLLECTOR.name])
        self._instances = instance_values(_instances(of))
        self._holders = holder_values(of.get(allocation.COLLECTOR.name))

    def of(self, values: Values) -> Found:
        """The values that are known, by their labels. Of an instance nobody says who holds it, only of the whole."""
        found: Found = {}
        for instance, value in (values if isinstance(values, Mapping) else {WHOLE_GPU: values}).items():
            if value is None:
                continue
            if instance == WHOLE_GPU:
                found[(*self._identity, *NO_INSTANCE, *self._holders)] = value
            elif instance in self._instances:
                found[(*self._identity, *self._instances[instance], *NOBODY)] = value
        return found


def _instances(of: Known) -> list[MigInstance]:
    return list(of.get(mig.COLLECTOR.name, ()))


def _with_framebuffers(of: Known) -> Known:
    """Memory by instance; that of a whole GPU which is split would count it twice."""
    if memory.COLLECTOR.name not in of:
        return of
    split = {str(i.gpu_instance): i.memory for i in _instances(of) if i.memory}
    whole = of[memory.COLLECTOR.name].device
    framebuffers: Framebuffers = split or ({WHOLE_GPU: whole} if whole else {})
    return of | {memory.COLLECTOR.name: framebuffers}
