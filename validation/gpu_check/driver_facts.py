"""Facts that the driver's documentation leaves open, and the microseconds of each driver call."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

import pynvml
from validation.gpu_check.report import Check

from rankscope_exporter.gpu.collector import Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.fields import ALL_LINKS
from rankscope_exporter.gpu.nvml.gpm import RATES, RATIOS, GpmSampler
from rankscope_exporter.gpu.nvml.mig import gpu_instances
from rankscope_exporter.registry import GPU_COLLECTORS

RING_FILLS_WITHIN = 3.0  # seconds after the start of a simulated driver
READINGS = 5
APART = 0.12  # seconds between two readings; GPM needs more than 0.1
RINGS = ("GPU_UTILIZATION", "MEMORY_UTILIZATION", "ENC_UTILIZATION", "DEC_UTILIZATION", "TOTAL_POWER")
VALUE_TYPES = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_VALUE_TYPE_")}
FIELDS = {
    "PCIe bytes": ("PCIE_COUNT_TX_BYTES", "PCIE_COUNT_RX_BYTES"),
    "throttle counters": ("PERF_POLICY_POWER", "PERF_POLICY_THERMAL", "PERF_POLICY_SYNC_BOOST"),
    "T.Limit thresholds": tuple(
        f"TEMPERATURE_{name}_TLIMIT" for name in ("SHUTDOWN", "SLOWDOWN", "MEM_MAX", "GPU_MAX")
    ),
    "NVLink bytes": ("NVLINK_THROUGHPUT_DATA_TX", "NVLINK_THROUGHPUT_DATA_RX"),
    "NVLink count, errors": ("NVLINK_LINK_COUNT", "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
}
MOVED = (*range(251, 256), *range(269, 274))  # fields whose numbers differ between versions of the bindings


def check(argument: str = "") -> Iterator[Check]:
    """Yield every fact about the first GPU, then the cost of the calls; with `mig` only GPM's. Raises DriverError."""
    driver = Driver()
    driver.connect()
    device = driver.device(0)
    if argument == "mig":
        yield from gpm_of_instances(device)
        return
    yield asked("NVML, bindings", lambda: f"{pynvml.nvmlSystemGetNVMLVersion()}, {metadata.version('nvidia-ml-py')}")
    for about, names in FIELDS.items():
        scopes = (ALL_LINKS, 0, 1) if about == "NVLink bytes" else (0,)
        numbers = [(getattr(pynvml, f"NVML_FI_DEV_{name}"), scope) for name in names for scope in scopes]
        yield asked(f"fields: {about}", raw_fields, device, numbers)
    yield asked("fields whose numbers moved", raw_fields, device, MOVED)
    for ring in RINGS:
        yield asked(f"ring {ring}", describe_ring, device, getattr(pynvml, f"NVML_{ring}_SAMPLES"))
    yield asked("GPM: value or return code of each metric", describe_gpm, device)
    yield from call_costs(device)


def asked(about: str, question: Callable[..., object], *arguments: Any) -> Check:
    """Return the driver's answer as a fact; an error is an answer, too."""
    try:
        return Check(about, "measured", str(question(*arguments)))
    except Exception as error:
        return Check(about, "measured", f"{type(error).__name__}: {error}")


def raw_fields(device: Device, numbers: Sequence[Any]) -> str:
    """Return each field's return code, or its type and its bytes as an unsigned and a signed number."""
    answers = pynvml.nvmlDeviceGetFieldValues(device.handle, numbers)
    return "; ".join(f"{field.fieldId} scope {field.scopeId:#x}: {_value(field)}" for field in answers)


def _value(field: Any) -> str:
    if field.nvmlReturn:
        return f"return {field.nvmlReturn}"
    return f"{VALUE_TYPES.get(field.valueType)} {field.value.ullVal} (as int {field.value.siVal})"


def describe_ring(device: Device, ring: int) -> str:
    """Return type, depth, period and age of a ring of samples, and whether a cursor excludes its own sample."""
    until, times = time.monotonic() + RING_FILLS_WITHIN, list[int]()
    while len(times) < 3 and time.monotonic() < until:  # a driver that has just started has few samples
        kind, samples = pynvml.nvmlDeviceGetSamples(device.handle, ring, 0)
        times = sorted(sample.timeStamp for sample in samples if sample.timeStamp)
        time.sleep(APART)
    if len(times) < 3:
        return f"{VALUE_TYPES.get(kind)}, {len(times)} samples"
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    later = pynvml.nvmlDeviceGetSamples(device.handle, ring, times[-3])[1]
    cursor = "inclusive" if times[-3] in {sample.timeStamp for sample in later} else "strict"
    period = f"{min(gaps)} to {max(gaps)} µs apart (median {statistics.median(gaps):.0f})"
    age = f"the last {time.time() - times[-1] / 1e6:.2f} s old"
    return f"{VALUE_TYPES.get(kind)}, {len(times)} samples, {period}, {age}, cursor {cursor}"


def describe_gpm(device: Device, instance: int | None = None) -> str:
    """Return the size of the struct, and each metric's value or return code, of the GPU or a MIG instance."""
    size = f"struct of {ctypes.sizeof(pynvml.c_nvmlGpmMetricsGet_t)} bytes"
    if not device.supports_gpm():
        return f"{size}, not supported"
    sampler = GpmSampler(device, instance)
    for elapsed in (0.0, 2 * APART):
        time.sleep(2 * APART)
        sampler.measure(elapsed, time.monotonic())
    answers = zip((*RATIOS, *RATES), sampler._request.metrics, strict=False)
    return f"{size}: {', '.join(f'{name} {a.value:.4g} (return {a.nvmlReturn})' for name, a in answers)}"


def gpm_of_instances(device: Device) -> Iterator[Check]:
    """Yield GPM's values of each MIG instance, if MIG is enabled. The mode is never changed."""
    instances = gpu_instances(device)
    if not instances or not device.supports_gpm():
        yield Check("GPM under MIG", "absent", note="MIG is disabled" if not instances else "no GPM")
    for instance in instances if device.supports_gpm() else ():
        yield asked(f"GPM of MIG instance {instance}", describe_gpm, device, instance)


def call_costs(device: Device) -> Iterator[Check]:
    """Yield the microseconds of each driver call of the collectors, and of each collector's whole reading."""
    costs: dict[str, list[float]] = {}
    for name, call in list(vars(pynvml).items()):
        if name.startswith(("nvmlDevice", "nvmlGpm")):
            setattr(pynvml, name, timed(costs.setdefault(name, []), call))
    for collector in GPU_COLLECTORS:
        read = timed(costs.setdefault(f"collector {collector.name}", []), collector.reader())
        with suppress(DriverError):
            for _ in range(READINGS):
                read(device, Tick(time.time(), APART))
                time.sleep(APART)
    for name, seconds in sorted(costs.items()):
        if seconds:
            note = f"first {1e6 * seconds[0]:.0f}, at most {1e6 * max(seconds):.0f}, {len(seconds)} calls"
            yield Check(name, "measured", f"{1e6 * statistics.median(seconds):.0f} µs", note=note)


def timed(seconds: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the call and appends its duration to the list."""

    def measured(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            seconds.append(time.perf_counter() - began)

    return measured
