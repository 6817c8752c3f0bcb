"""One GPU in NVML: one method per value, in base units; None if the device does not have it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import pynvml

from rankscope_exporter.gpu.nvml.errors import DriverError, ask
from rankscope_exporter.gpu.nvml.fields import FieldId, field_values, known, value_of

# Reasons for low clocks: bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h: nvmlClocksEventReason…; the last two
# exist only as nvmlClocksThrottleReason…, the older name).
CLOCK_EVENT_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
UNKNOWN_REASON = "other"
ClockDomain = Literal["graphics", "sm", "memory", "video"]
CLOCK_DOMAINS: dict[ClockDomain, int] = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}

Engine = Literal["gpu", "memory", "encoder", "decoder"]
_RINGS: dict[Engine, int] = {
    "gpu": pynvml.NVML_GPU_UTILIZATION_SAMPLES,
    "memory": pynvml.NVML_MEMORY_UTILIZATION_SAMPLES,
    "encoder": pynvml.NVML_ENC_UTILIZATION_SAMPLES,
    "decoder": pynvml.NVML_DEC_UTILIZATION_SAMPLES,
}
LONGEST_STEP = 3  # sampling periods between two samples of a full ring


@dataclass(frozen=True)
class UtilizationSample:
    """Utilization since the previous sample: the share of time in which a kernel or the engine ran."""

    timestamp_us: int
    """Microseconds of the driver's clock: unix time on most systems, time since boot on some."""
    percent: float


@dataclass(frozen=True)
class Memory:
    """Memory in bytes. `used` excludes `reserved` if that is known."""

    total: int
    used: int
    free: int
    reserved: int | None = None


@dataclass(frozen=True)
class PowerLimits:
    """Default and range of the power limit in watts."""

    default: float | None
    lowest: float | None
    highest: float | None


class Device:
    """An open handle of one GPU. Every method may raise DeviceLostError or DriverError."""

    def __init__(self, index: int, *, uses_gpm: bool = True) -> None:
        self.index = index
        self._uses_gpm = uses_gpm
        self._rings_seen: set[Engine] = set()
        self._at_close: list[Callable[[], None]] = []
        self.gpm_samplers: dict[int | None, Any] = {}
        """GPM's samplers by MIG instance, which all collectors share (gpm.py)."""
        self.handle = _required(pynvml.nvmlDeviceGetHandleByIndex, index)
        self.is_open = True
        self.reported_uuid: str = ask(pynvml.nvmlDeviceGetUUID, self.handle) or ""
        """The driver's UUID. It may be empty, zeros, or the UUID of a second GPU on some virtual machines."""
        self.uuid = self.reported_uuid
        """UUID that identifies this GPU on this machine. GpuStates sets it if the reported one is ambiguous."""

    def at_close(self, callback: Callable[[], None]) -> None:
        """Register a callback for the time before the handle is closed, in the thread that reads the device."""
        self._at_close.append(callback)

    def close(self) -> None:
        """Run the callbacks. The handle itself belongs to the connection."""
        self.is_open = False
        while self._at_close:
            callback = self._at_close.pop()
            with contextlib.suppress(DriverError):  # the connection is already closed, which freed the resource
                callback()

    def fields(self, *ids: FieldId) -> list[float | None]:
        """Return the values of these fields of nvmlDeviceGetFieldValues, in one call."""
        return field_values(self.handle, ids)

    def check(self) -> None:
        """Call a function that every GPU has and that is never cached. Raises if the GPU does not answer."""
        ask(pynvml.nvmlDeviceGetPerformanceState, self.handle)

    def name(self) -> str | None:
        """Return the product name, such as `NVIDIA H100 80GB HBM3`."""
        return _text(ask(pynvml.nvmlDeviceGetName, self.handle))

    def pci_bus_id(self) -> str | None:
        """Return the PCI address as domain:bus:device.function."""
        info = ask(pynvml.nvmlDeviceGetPciInfo, self.handle)
        return None if info is None else _text(info.busId)

    def minor_number(self) -> int | None:
        """Return the N of its device file /dev/nvidiaN, which may differ from its index."""
        number = ask(pynvml.nvmlDeviceGetMinorNumber, self.handle)
        return None if number is None else int(number)

    def utilization(self, engine: Engine = "gpu") -> float | None:
        """Return the share (0 to 1) of the last sample period (1/6 s to 1 s by product) in which the engine was active.

        `gpu`: any kernel; `memory`: reads or writes; `encoder`, `decoder`: of video.
        """
        percent = known(self._percent(engine))
        return None if percent is None else min(percent, 100) / 100

    def _percent(self, engine: Engine) -> int | None:
        if engine == "encoder":
            answer = ask(pynvml.nvmlDeviceGetEncoderUtilization, self.handle)
        elif engine == "decoder":
            answer = ask(pynvml.nvmlDeviceGetDecoderUtilization, self.handle)
        else:
            rates = ask(pynvml.nvmlDeviceGetUtilizationRates, self.handle)
            answer = None if rates is None else [getattr(rates, engine)]
        return None if answer is None else int(answer[0])

    def utilization_samples(self, engine: Engine = "gpu") -> Iterator[UtilizationSample] | None:
        """Return all samples of the ring, newest first. Samples are converted lazily."""
        try:
            answer = ask(pynvml.nvmlDeviceGetSamples, self.handle, _RINGS[engine], 0)
        except DriverError as error:
            if error.code == pynvml.NVML_ERROR_NOT_FOUND:
                return iter(())
            raise
        return None if answer is None else _newest_first(*answer)

    def samples_utilization(self, engine: Engine = "gpu") -> bool:
        """Return whether the driver keeps a ring of samples. A ring that was always empty does not count."""
        if engine not in self._rings_seen and any(True for _ in self.utilization_samples(engine) or ()):
            self._rings_seen.add(engine)
        return engine in self._rings_seen

    def supports_gpm(self) -> bool:
        """Return whether the device has GPM (gpm.py), and it may be used."""
        support = ask(pynvml.nvmlGpmQueryDeviceSupport, self.handle) if self._uses_gpm else None
        return support is not None and bool(support.isSupportedDevice)

    def driver_version(self) -> str | None:
        """Return the driver's version."""
        return _text(ask(pynvml.nvmlSystemGetDriverVersion))

    def cuda_version(self) -> str | None:
        """Return the newest CUDA version that the driver supports, as major.minor."""
        number = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def memory(self) -> Memory | None:
        """Return the device's memory."""
        info = ask(pynvml.nvmlDeviceGetMemoryInfo, self.handle, pynvml.nvmlMemory_v2)
        if info is not None:
            return Memory(info.total, info.used, info.free, info.reserved)
        # Drivers before 510 support only version 1, whose `used` includes the driver's reserved memory (912 instead of
        # 7.8 MB on an idle A100) without reporting its size.
        info = ask(pynvml.nvmlDeviceGetMemoryInfo, self.handle)
        return None if info is None else Memory(info.total, info.used, info.free)

    def bar1_memory(self) -> Memory | None:
        """Return the memory of BAR1, the window through which the PCIe bus accesses the device's memory."""
        info = ask(pynvml.nvmlDeviceGetBAR1MemoryInfo, self.handle)
        return None if info is None else Memory(info.bar1Total, info.bar1Used, info.bar1Free)

    def power(self) -> float | None:
        """Return the current power draw in watts (the mean of the last second on most products)."""
        return _thousandth(ask(pynvml.nvmlDeviceGetPowerUsage, self.handle))

    def power_limit(self) -> float | None:
        """Return the enforced power limit in watts."""
        return _thousandth(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, self.handle))

    def power_limits(self) -> PowerLimits:
        """Return default and range of the power limit in watts."""
        default = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, self.handle)
        lowest, highest = ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, self.handle) or (None, None)
        return PowerLimits(_thousandth(default), _thousandth(lowest), _thousandth(highest))

    def energy(self) -> float | None:
        """Return the joules used since the driver was loaded."""
        return _thousandth(ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, self.handle))

    def temperature(self) -> float | None:
        """Return the temperature of the GPU die in degrees Celsius."""
        return known(ask(pynvml.nvmlDeviceGetTemperature, self.handle, pynvml.NVML_TEMPERATURE_GPU))

    def performance_state(self) -> int | None:
        """Return the performance state: 0 (highest) to 15 (lowest); None if the driver reports it as unknown (32)."""
        state = ask(pynvml.nvmlDeviceGetPerformanceState, self.handle)
        return None if state is None or state == pynvml.NVML_PSTATE_UNKNOWN else int(state)

    def clock(self, domain: ClockDomain) -> float | None:
        """Return the current clock in hertz."""
        return _million(ask(pynvml.nvmlDeviceGetClockInfo, self.handle, CLOCK_DOMAINS[domain]))

    def clock_max(self, domain: ClockDomain) -> float | None:
        """Return the maximum clock in hertz."""
        return _million(ask(pynvml.nvmlDeviceGetMaxClockInfo, self.handle, CLOCK_DOMAINS[domain]))

    def clock_event_reasons(self) -> frozenset[str] | None:
        """Return the reasons why the clocks are low now. Reasons unknown to this version are "other"."""
        mask = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, self.handle)
        if mask is None:  # the function's name before driver 535
            mask = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self.handle)
        if mask is None:
            return None
        bits = (1 << index for index in range(64) if mask >> index & 1)
        return frozenset(CLOCK_EVENT_REASONS.get(bit, UNKNOWN_REASON) for bit in bits)

    def memory_bandwidth_max(self) -> float | None:
        """Return the bytes per second of the memory's bus at its maximum clock, in one direction at a time."""
        clock, bits = self.clock_max("memory"), known(ask(pynvml.nvmlDeviceGetMemoryBusWidth, self.handle))
        # Two transfers a clock: 2619 MHz and 5120 bits are the 3.35 TB/s of an H100 SXM5's data sheet.
        return 2 * clock * bits / 8 if clock and bits else None

    def compute_pids(self) -> list[int] | None:
        """Return the ids of processes with a compute context, without those that only draw; None if not supported."""
        compute = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, self.handle)
        return None if compute is None else [process.pid for process in compute]

    def processes(self) -> dict[int, int | None] | None:
        """Return the bytes of each process with a compute or graphics context, by pid; None if not supported."""
        compute = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, self.handle)
        graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses, self.handle)
        if compute is None and graphics is None:
            return None
        # A process with both kinds of contexts is in both lists, each with all of its memory.
        return {process.pid: process.usedGpuMemory for process in [*(compute or ()), *(graphics or ())]}

    def pids(self) -> frozenset[int] | None:
        """Return the ids of processes with a compute or graphics context."""
        processes = self.processes()
        return None if processes is None else frozenset(processes)


def _required(call: Any, *arguments: Any) -> Any:
    """Call `ask` for a value that every device must have. Raises DriverError if it is not supported."""
    answer = ask(call, *arguments)
    if answer is None:
        raise DriverError(call.__name__, pynvml.NVML_ERROR_NOT_SUPPORTED, "not supported")
    return answer


def _newest_first(value_type: int, samples: Sequence[Any]) -> Iterator[UtilizationSample]:
    for sample in reversed(_in_order(samples)):
        percent = value_of(value_type, sample.sampleValue)
        if percent is not None and sample.timeStamp:  # unused entries of the ring have no timestamp
            yield UtilizationSample(sample.timeStamp, percent)


def _in_order(samples: Sequence[Any]) -> Sequence[Any]:
    """Return the samples oldest first. Some drivers return the ring as it lies in memory, where the oldest is anywhere.

    For such a ring, nvidia-smi 430 reports 99 samples in 18446744073709.22 s: the last one is two periods older than
    the first. In a ring whose clock was set back, the two are further apart.
    """
    if not samples or samples[-1].timeStamp >= samples[0].timeStamp:
        return samples
    used = [sample for sample in samples if sample.timeStamp]
    steps = [later.timeStamp - earlier.timeStamp for earlier, later in pairwise(used)]
    step_at_wrap = used[0].timeStamp - used[-1].timeStamp if used else 0
    if sum(step < 0 for step in steps) != 1 or step_at_wrap > LONGEST_STEP * median(steps):
        return used
    oldest = steps.index(min(steps)) + 1
    return used[oldest:] + used[:oldest]


def _thousandth(value: int | None) -> float | None:
    number = known(value)
    return None if number is None else number / 1000


def _million(value: int | None) -> float | None:
    number = known(value)
    return None if number is None else number * 1e6


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
