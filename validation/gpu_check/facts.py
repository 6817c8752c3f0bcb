"""Part 3: what documentation leaves open about the driver, asked of the driver. Each fact is a line with raw values."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import pynvml
from validation.gpu_check.report import Check, Outcome, surviving

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.events import XidEvents
from rankscope_exporter.gpu.nvml.fields import ALL_LINKS

PART = "facts about the driver"
RINGS = {
    "GPU_UTILIZATION": pynvml.NVML_GPU_UTILIZATION_SAMPLES,
    "MEMORY_UTILIZATION": pynvml.NVML_MEMORY_UTILIZATION_SAMPLES,
    "ENC_UTILIZATION": pynvml.NVML_ENC_UTILIZATION_SAMPLES,
    "DEC_UTILIZATION": pynvml.NVML_DEC_UTILIZATION_SAMPLES,
    "TOTAL_POWER": pynvml.NVML_TOTAL_POWER_SAMPLES,
}
VALUE_TYPES = {
    value: name.removeprefix("NVML_VALUE_TYPE_")
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_VALUE_TYPE_") and not name.endswith("COUNT")
}
THROTTLE = ("PERF_POLICY_POWER", "PERF_POLICY_THERMAL", "PERF_POLICY_SYNC_BOOST", "PERF_POLICY_BOARD_LIMIT")
# Fields whose numbers moved between versions of the bindings: asked by number (see nvml/throttle.py).
MOVED = (*range(251, 256), *range(269, 274))
PCIE_FIELDS = (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
LINKS = 18  # the most that a GPU to Blackwell has
TLIMITS = ("SHUTDOWN", "SLOWDOWN", "MEM_MAX", "GPU_MAX")


def fact(about: str, value: object, note: str = "", outcome: Outcome = "measured") -> Check:
    return Check(PART, about, outcome, str(value), note=note)


def asked(about: str, question: Callable[[], object], note: str = "") -> Check:
    """A line with what the driver answers; that it refuses is an answer too."""
    try:
        return fact(about, question(), note)
    except pynvml.NVMLError as error:
        return fact(about, f"error {error.value}: {error}", note)


def raw_fields(device: Device, ids: Sequence[Any]) -> str:
    """Each field's return code, type and all of its bytes as the two ways to read them."""
    answers = pynvml.nvmlDeviceGetFieldValues(device.handle, ids)
    return "; ".join(_raw(answer) for answer in answers)


def _raw(answer: Any) -> str:
    name = f"{answer.fieldId}" + (f" scope {answer.scopeId:#x}" if answer.scopeId else "")
    if answer.nvmlReturn:
        return f"{name}: return {answer.nvmlReturn}"
    kind = VALUE_TYPES.get(answer.valueType, f"type {answer.valueType}")
    return f"{name}: {kind} {answer.value.ullVal} (as int {answer.value.siVal})"


def versions(device: Device) -> Iterator[Check]:
    """Driver, NVML and bindings, and whether the parts of the memory make the whole."""
    bindings = metadata.version("nvidia-ml-py")
    yield fact("driver, CUDA, bindings", f"{device.driver_version()}, {device.cuda_version()}, {bindings}")
    yield asked("NVML", pynvml.nvmlSystemGetNVMLVersion)
    yield fact("device", f"{device.name()} {device.uuid} {device.pci_bus_id()}")
    yield asked("memory v2", lambda: _memory(device))


def _memory(device: Device) -> str:
    memory = pynvml.nvmlDeviceGetMemoryInfo(device.handle, pynvml.nvmlMemory_v2)
    rest = memory.total - memory.reserved - memory.used - memory.free
    return f"total {memory.total} reserved {memory.reserved} used {memory.used} free {memory.free}, rest {rest}"


def pcie(device: Device) -> Iterator[Check]:
    """The counters that may wrap at 32 bits: twice, so that their growth at rest shows too."""
    for moment in ("at first", "a second later"):
        yield asked(f"PCIe fields, {moment}", lambda: raw_fields(device, PCIE_FIELDS), "bytes sent, bytes received")
        time.sleep(1)


def throttle(device: Device) -> Iterator[Check]:
    """What the throttle counters are; their unit shows beside nvidia-smi's microseconds in the comparison."""
    ids = [getattr(pynvml, f"NVML_FI_DEV_{name}") for name in THROTTLE]
    yield asked("throttle counters", lambda: raw_fields(device, ids), "expected: nanoseconds")
    yield asked("fields that moved", lambda: raw_fields(device, MOVED), "by number")


def t_limit(device: Device) -> Iterator[Check]:
    """Whether negative margins arrive signed."""
    ids = [getattr(pynvml, f"NVML_FI_DEV_TEMPERATURE_{name}_TLIMIT") for name in TLIMITS]
    yield asked("T.Limit fields", lambda: raw_fields(device, ids), ", ".join(TLIMITS).lower())
    yield asked("T.Limit margin", lambda: pynvml.nvmlDeviceGetMarginTemperature(device.handle))


def nvlink(device: Device) -> Iterator[Check]:
    """Whether the scope for all links is taken."""
    yield asked("NVLink count", lambda: raw_fields(device, [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT]))
    data = [pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX]
    scopes = [(field, scope) for field in data for scope in (ALL_LINKS, 0, 1)]
    yield asked("NVLink bytes by scope", lambda: raw_fields(device, scopes), f"{ALL_LINKS:#x}: all links")
    totals = [pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL]
    yield asked("NVLink errors", lambda: raw_fields(device, totals))
    yield fact("NVLink states", " ".join(_link_state(device, link) for link in range(LINKS)))


def _link_state(device: Device, link: int) -> str:
    try:
        return str(pynvml.nvmlDeviceGetNvLinkState(device.handle, link))
    except pynvml.NVMLError as error:
        return f"error {error.value}"


def rings(device: Device) -> Iterator[Check]:
    """Length and spacing of the rings of samples, and whether the cursor's own sample comes again."""
    for name, ring in RINGS.items():
        try:
            kind, samples = pynvml.nvmlDeviceGetSamples(device.handle, ring, 0)
        except pynvml.NVMLError as error:
            yield fact(f"ring {name}", f"error {error.value}: {error}")
            continue
        times = [sample.timeStamp for sample in samples if sample.timeStamp]
        yield fact(f"ring {name}", _spacing(times), f"values are {VALUE_TYPES.get(kind, kind)}")
        if name == "GPU_UTILIZATION" and len(times) > 4:
            yield fact("cursor of nvmlDeviceGetSamples", _cursor(device, ring, sorted(times)))


def _spacing(times: Sequence[int]) -> str:
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(times))]
    if not gaps:
        return f"{len(times)} samples"
    median = statistics.median(gaps)
    ordered = "in order" if list(times) == sorted(times) else "not in order"
    age = time.time() - max(times) / 1e6
    about = f"{len(times)} samples {ordered}, {min(gaps)} to {max(gaps)} µs apart (median {median:.0f})"
    return f"{about}, over {sum(gaps) / 1e6:.2f} s, the last {age:.2f} s old"


def _cursor(device: Device, ring: int, times: Sequence[int]) -> str:
    """Asked with the time of one of the newest samples: a ring drops its oldest meanwhile."""
    cursor = times[-3]
    _, samples = pynvml.nvmlDeviceGetSamples(device.handle, ring, cursor)
    seen = {sample.timeStamp for sample in samples if sample.timeStamp}
    kind = "inclusive (>=)" if cursor in seen else "strict (>)"
    return (
        f"{kind}: {len([t for t in seen if t > cursor])} later samples, {len([t for t in seen if t < cursor])} earlier"
    )


def gpm(device: Device) -> Iterator[Check]:
    """Size and version of the structs that this driver takes, and what every metric answers."""
    sizes = (ctypes.sizeof(kind) for kind in (pynvml.c_nvmlGpmMetricsGet_t, pynvml.c_nvmlGpmMetric_t))
    yield fact("GPM struct and metric, bytes", ", ".join(map(str, sizes)))
    yield asked("GPM supported", lambda: pynvml.nvmlGpmQueryDeviceSupport(device.handle).isSupportedDevice)
    yield asked("GPM metrics at rest", lambda: _gpm(device), "number: value, or the return code")


def _gpm(device: Device) -> str:
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    try:
        for sample in samples:
            time.sleep(0.25)
            pynvml.nvmlGpmSampleGet(device.handle, sample)
        return _gpm_values(*samples)
    finally:
        for sample in samples:
            pynvml.nvmlGpmSampleFree(sample)


def _gpm_values(first: Any, second: Any) -> str:
    ids = [pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL + offset for offset in range(13)]
    ids += [pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC]
    ids += [pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC]
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(ids)
    request.sample1, request.sample2 = first, second
    for index, metric in enumerate(ids):
        request.metrics[index].metricId = metric
    pynvml.nvmlGpmMetricsGet(request)
    answers = ((m, request.metrics[index]) for index, m in enumerate(ids))
    return "; ".join(f"{m}: return {a.nvmlReturn}" if a.nvmlReturn else f"{m}: {a.value:.4g}" for m, a in answers)


def processes(device: Device) -> Iterator[Check]:
    """As the driver names them: the load's pid should be among them while it runs."""
    yield fact("processes", device.processes())


def power(device: Device) -> Iterator[Check]:
    """How often the driver renews its reading of power and its energy counter."""
    for name, read in (("power", device.power), ("energy counter", device.energy)):
        until, changes, last = time.monotonic() + 1.0, 0, read()
        while time.monotonic() < until:
            value = read()
            changes, last = changes + (value != last), value
            time.sleep(0.002)
        yield fact(f"changes of the {name} in a second", changes, f"last {last}")


def xid_events(device: Device) -> Iterator[Check]:
    """Whether XIDs can be watched."""
    events = XidEvents()
    try:
        registered = events.register(device)
        yield fact("XID events registered", registered, outcome="ok" if registered else "differs")
        yield fact("wait for an XID, 0.2 s", events.wait(0.2), "None: there was none")
    finally:
        events.close()


FACTS = (versions, pcie, throttle, t_limit, nvlink, rings, gpm, processes, power, xid_events)


def facts(device: Device) -> Iterator[Check]:
    """All of them; one that fails costs itself alone."""
    for ask in FACTS:
        yield from surviving(PART, ask.__name__, ask(device))
