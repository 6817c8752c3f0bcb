"""One GPU as NVML sees it: a method a quantity, in base units; None where this device does not have it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pynvml

from rankscope_exporter.gpu.nvml.errors import DriverError, ask
from rankscope_exporter.gpu.nvml.fields import FieldId, field_values, known, value_of

# Why clocks are lower than they could be: bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h:
# nvmlClocksEventReason…; the last two exist only under the older name, nvmlClocksThrottleReason…).
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


@dataclass(frozen=True)
class UtilizationSample:
    """How busy the GPU was since the sample before: the share of the time in which a kernel (or that engine) ran."""

    timestamp_us: int
    """Microseconds by a clock of the driver's: unix time on most systems, the time since boot on some."""
    percent: float


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes; `used` is without `reserved` where the latter is known."""

    total: int
    used: int
    free: int
    reserved: int | None = None


@dataclass(frozen=True)
class PowerLimits:
    """What the power limit may be set to, and what it is at first; watts."""

    default: float | None
    lowest: float | None
    highest: float | None


class Device:
    """An open handle on one GPU. Every method may raise DeviceLostError or DriverError."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._rings_seen: set[Engine] = set()
        self._at_close: list[Callable[[], None]] = []
        self._handle = _required(pynvml.nvmlDeviceGetHandleByIndex, index)
        self.is_open = True
        self.reported_uuid: str = ask(pynvml.nvmlDeviceGetUUID, self._handle) or ""
        """What the driver says: empty, zeros, or that of a second GPU on some virtual machines."""
        self.uuid = self.reported_uuid
        """What tells it from every other GPU of this machine; whoever knows those sets it."""

    @property
    def handle(self) -> Any:
        """NVML's handle, for the event set."""
        return self._handle

    def at_close(self, give_back: Callable[[], None]) -> None:
        """Have this called before the handle is let go of, by the thread that reads the device."""
        self._at_close.append(give_back)

    def close(self) -> None:
        """Give back what was made for the device; the handle itself belongs to the connection."""
        self.is_open = False
        while self._at_close:
            give_back = self._at_close.pop()
            with contextlib.suppress(DriverError):  # the connection for which it was made is gone, and takes it along
                give_back()

    def fields(self, *ids: FieldId) -> list[float | None]:
        """The values of these fields of nvmlDeviceGetFieldValues, in one call."""
        return field_values(self._handle, ids)

    def check(self) -> None:
        """Ask for something that every GPU has and that is never answered from a cache: raises if it is not there."""
        ask(pynvml.nvmlDeviceGetPerformanceState, self._handle)

    def name(self) -> str | None:
        """The product's name, as `NVIDIA H100 80GB HBM3`."""
        return _text(ask(pynvml.nvmlDeviceGetName, self._handle))

    def pci_bus_id(self) -> str | None:
        """Where it is on the PCI bus, as domain:bus:device.function."""
        info = ask(pynvml.nvmlDeviceGetPciInfo, self._handle)
        return None if info is None else _text(info.busId)

    def minor_number(self) -> int | None:
        """Return the N of its device file /dev/nvidiaN, which need not be its index."""
        number = ask(pynvml.nvmlDeviceGetMinorNumber, self._handle)
        return None if number is None else int(number)

    def utilization(self, engine: Engine = "gpu") -> float | None:
        """The share (0 to 1) of the last sample period, 1/6 s to 1 s by product, in which the engine ran.

        `gpu`: some kernel; `memory`: reading or writing; `encoder`, `decoder`: of video.
        """
        percent = known(self._percent(engine))
        return None if percent is None else min(percent, 100) / 100

    def _percent(self, engine: Engine) -> int | None:
        if engine == "encoder":
            answer = ask(pynvml.nvmlDeviceGetEncoderUtilization, self._handle)
        elif engine == "decoder":
            answer = ask(pynvml.nvmlDeviceGetDecoderUtilization, self._handle)
        else:
            rates = ask(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
            answer = None if rates is None else [getattr(rates, engine)]
        return None if answer is None else int(answer[0])

    def utilization_samples(self, engine: Engine = "gpu") -> Iterator[UtilizationSample] | None:
        """All samples of the ring, the newest first; each is converted when it is asked for."""
        try:
            answer = ask(pynvml.nvmlDeviceGetSamples, self._handle, _RINGS[engine], 0)
        except DriverError as error:
            if error.code == pynvml.NVML_ERROR_NOT_FOUND:
                return iter(())
            raise
        return None if answer is None else _newest_first(*answer)

    def samples_utilization(self, engine: Engine = "gpu") -> bool:
        """Whether the driver keeps a ring of samples. One that has never held any counts as none."""
        if engine not in self._rings_seen and any(True for _ in self.utilization_samples(engine) or ()):
            self._rings_seen.add(engine)
        return engine in self._rings_seen

    def driver_version(self) -> str | None:
        """The version of its driver."""
        return _text(ask(pynvml.nvmlSystemGetDriverVersion))

    def cuda_version(self) -> str | None:
        """The newest CUDA that its driver supports, as major.minor."""
        number = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def memory(self) -> Memory | None:
        """Of the whole device."""
        info = ask(pynvml.nvmlDeviceGetMemoryInfo, self._handle, pynvml.nvmlMemory_v2)
        if info is not None:
            return Memory(info.total, info.used, info.free, info.reserved)
        # Drivers before 510 know only version 1, in which `used` contains what the driver reserves (on an idle A100
        # 912 MB instead of 7.8), and nothing says how much that is.
        info = ask(pynvml.nvmlDeviceGetMemoryInfo, self._handle)
        return None if info is None else Memory(info.total, info.used, info.free)

    def bar1_memory(self) -> Memory | None:
        """The window through which the PCIe bus reaches the device's memory."""
        info = ask(pynvml.nvmlDeviceGetBAR1MemoryInfo, self._handle)
        return None if info is None else Memory(info.bar1Total, info.bar1Used, info.bar1Free)

    def power(self) -> float | None:
        """Watts drawn now (on most products a mean of the last second)."""
        return _thousandth(ask(pynvml.nvmlDeviceGetPowerUsage, self._handle))

    def power_limit(self) -> float | None:
        """Watts that the driver enforces now."""
        return _thousandth(ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, self._handle))

    def power_limits(self) -> PowerLimits:
        """Default and range of the power limit."""
        default = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, self._handle)
        lowest, highest = ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, self._handle) or (None, None)
        return PowerLimits(_thousandth(default), _thousandth(lowest), _thousandth(highest))

    def energy(self) -> float | None:
        """Joules since the driver was loaded."""
        return _thousandth(ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle))

    def temperature(self) -> float | None:
        """Degrees Celsius of the GPU die."""
        return known(ask(pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU))

    def performance_state(self) -> int | None:
        """0, the most, to 15, the least; 32 is how the driver says that it does not know."""
        state = ask(pynvml.nvmlDeviceGetPerformanceState, self._handle)
        return None if state is None or state == pynvml.NVML_PSTATE_UNKNOWN else int(state)

    def clock(self, domain: ClockDomain) -> float | None:
        """The clock at this moment, in hertz."""
        return _million(ask(pynvml.nvmlDeviceGetClockInfo, self._handle, CLOCK_DOMAINS[domain]))

    def clock_max(self, domain: ClockDomain) -> float | None:
        """The most hertz that the device can do."""
        return _million(ask(pynvml.nvmlDeviceGetMaxClockInfo, self._handle, CLOCK_DOMAINS[domain]))

    def clock_event_reasons(self) -> frozenset[str] | None:
        """Why the clocks are lower than they could be now; a reason newer than this version is "other"."""
        mask = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle)
        if mask is None:  # the name before driver 535
            mask = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        if mask is None:
            return None
        bits = (1 << index for index in range(64) if mask >> index & 1)
        return frozenset(CLOCK_EVENT_REASONS.get(bit, UNKNOWN_REASON) for bit in bits)

    def processes(self) -> dict[int, int | None] | None:
        """The memory in bytes of each process with a compute or graphics context, by pid; None if it is not told."""
        compute = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        graphics = ask(pynvml.nvmlDeviceGetGraphicsRunningProcesses, self._handle)
        if compute is None and graphics is None:
            return None
        # One with contexts of both kinds is in both lists, with all of its memory in each.
        return {process.pid: process.usedGpuMemory for process in [*(compute or ()), *(graphics or ())]}

    def pids(self) -> frozenset[int] | None:
        """Processes with a compute or graphics context, each once."""
        processes = self.processes()
        return None if processes is None else frozenset(processes)


def _required(call: Any, *arguments: Any) -> Any:
    """As `ask`, for what a device cannot be without."""
    answer = ask(call, *arguments)
    if answer is None:
        raise DriverError(call.__name__, pynvml.NVML_ERROR_NOT_SUPPORTED, "not supported")
    return answer


def _newest_first(value_type: int, samples: Sequence[Any]) -> Iterator[UtilizationSample]:
    for sample in reversed(samples):
        percent = value_of(value_type, sample.sampleValue)
        if percent is not None and sample.timeStamp:  # a place of the ring that was never filled has no stamp
            yield UtilizationSample(sample.timeStamp, percent)


def _thousandth(value: int | None) -> float | None:
    number = known(value)
    return None if number is None else number / 1000


def _million(value: int | None) -> float | None:
    number = known(value)
    return None if number is None else number * 1e6


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
