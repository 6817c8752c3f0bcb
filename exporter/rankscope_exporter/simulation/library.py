"""pynvml's view of the simulated driver: a replacement for libnvidia-ml.so with a plain function for each symbol.

pynvml looks symbols up as attributes of `pynvml.nvmlLib` and passes ctypes objects; `byref(x)` arrives with x as its
`_obj`. The functions fill those in and return NVML's codes, so every call, structure and error path of pynvml is real.
They must be plain functions because pynvml sets their `restype`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pynvml

from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.gpm import Sample, compare, fill
from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.gpu_calls import NO_INSTANCE
from rankscope_exporter.simulation.mig import SYMBOLS as MIG_SYMBOLS
from rankscope_exporter.simulation.mig import MigDevice, mig_devices
from rankscope_exporter.simulation.symbols import GPU_FUNCTIONS, GpuFunction

DRIVER_VERSION = "simulated"
CUDA_VERSION = 13000
EVENT_POLL = 0.02  # seconds


class EventSet:
    """Registered GPUs, and the number of delivered XIDs of each."""

    def __init__(self) -> None:
        self._delivered: dict[SimulatedGpu, int] = {}

    def register(self, gpu: SimulatedGpu, t: float) -> None:
        """Register a GPU at `t`. Earlier XIDs are not reported."""
        self._delivered.setdefault(gpu, sum(at <= t for at, _ in gpu.timeline.xids))

    def next(self, t: float) -> tuple[SimulatedGpu, int] | None:
        """Return an XID that has occurred by `t` and is not delivered yet; None if there is none."""
        for gpu, delivered in self._delivered.items():
            if delivered < len(gpu.timeline.xids) and gpu.timeline.xids[delivered][0] <= t:
                self._delivered[gpu] += 1
                return gpu, gpu.timeline.xids[delivered][1]
        return None


class SimulatedLibrary:
    """Library with one attribute per symbol. For pynvml a missing attribute is an unsupported function."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self._driver = driver
        self._connections = 0
        self._connected_to: int | None = None
        self._event_sets: dict[int, EventSet] = {}
        self._addresses = itertools.count(0x100000, 0x1000)
        devices: list[SimulatedGpu | MigDevice] = [*driver.gpus]
        devices += [device for gpu in driver.gpus for device in mig_devices(gpu)]
        self._gpus = {next(self._addresses): device for device in devices}
        self._samples: dict[int, Sample] = {}
        """The buffers of GPM, by address."""
        self._handles = {gpu: address for address, gpu in self._gpus.items()}
        functions = {name: self._of_gpu(name, function) for name, function in GPU_FUNCTIONS.items()}
        functions |= {name: self._checked(getattr(self, method)) for name, method in SYSTEM_FUNCTIONS.items()}
        self.__dict__.update(functions)
        self.nvmlInitWithFlags = lambda _flags: self._init()
        self.nvmlErrorString = lambda code: f"NVML code {code}".encode()

    def _init(self) -> int:
        load = self._driver.load()
        if load is None:
            return int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self._connections += 1
        self._connected_to = load
        return int(pynvml.NVML_SUCCESS)

    def _shutdown(self) -> None:
        self._connections -= 1
        if not self._connections:
            self._event_sets.clear()

    def _checked(self, function: Callable[..., int | None]) -> Callable[..., int]:
        """Wrap a function: unwrap `byref`, convert None to success, and reject calls without a valid connection."""

        def call(*arguments: Any) -> int:
            load = self._driver.load()
            if load is None:
                return int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if not self._connections or load != self._connected_to:
                return int(pynvml.NVML_ERROR_UNINITIALIZED)
            code = function(*(getattr(argument, "_obj", argument) for argument in arguments))
            return int(pynvml.NVML_SUCCESS) if code is None else code

        return call

    def _of_gpu(self, name: str, function: GpuFunction) -> Callable[..., int]:
        def call(handle: Any, *arguments: Any) -> int | None:
            gpu = self._gpus[_address(handle)]
            fault = self._fault(gpu, name)
            if fault is not None:
                return fault
            if isinstance(gpu, MigDevice) and name not in MIG_SYMBOLS:
                return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return function(gpu, self._driver.now(), *arguments)

        return self._checked(call)

    def _fault(self, gpu: SimulatedGpu | MigDevice, name: str) -> int | None:
        """Block if the scenario requires it. Then return the code of a failing call, None otherwise."""
        blocked = gpu.state(self._driver.now()).blocks.get(name)
        if blocked:
            self._driver.sleep(blocked)
        state = gpu.state(self._driver.now())
        return int(pynvml.NVML_ERROR_GPU_IS_LOST) if state.lost else state.fails.get(name)

    def _count(self, count: Any) -> None:
        count.value = len(self._driver.gpus)

    def _handle(self, index: Any, handle: Any) -> int | None:
        if index.value >= len(self._driver.gpus):
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu = self._driver.gpus[index.value]
        _point(handle, self._handles[gpu])
        return self._fault(gpu, "nvmlDeviceGetHandleByIndex_v2")

    def _mig_handle(self, handle: Any, index: Any, mig_handle: Any) -> int | None:
        devices = mig_devices(self._whole(handle))
        if index.value >= len(devices):
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        _point(mig_handle, self._handles[devices[index.value]])
        return None

    def _whole(self, handle: Any) -> SimulatedGpu:
        gpu = self._gpus[_address(handle)]
        return gpu.parent if isinstance(gpu, MigDevice) else gpu

    def _gpm_allocate(self, sample: Any) -> None:
        address = next(self._addresses)
        self._samples[address] = Sample(threading.get_ident())
        _point(sample, address)

    def _gpm_free(self, sample: Any) -> None:
        del self._samples[_address(sample)]

    def _gpm_fill(self, handle: Any, sample: Any) -> int | None:
        gpu = self._whole(handle)
        fault = self._fault(gpu, "nvmlGpmSampleGet")
        return fault or fill(self._samples.get(_address(sample)), gpu, None, self._driver.now())

    def _gpm_fill_mig(self, handle: Any, instance: int, sample: Any) -> int | None:
        gpu = self._whole(handle)
        fault = self._fault(gpu, "nvmlGpmMigSampleGet")
        return fault or fill(self._samples.get(_address(sample)), gpu, instance, self._driver.now())

    def _gpm_compare(self, request: Any) -> int | None:
        return compare(self._samples[_address(request.sample1)], self._samples[_address(request.sample2)], request)

    def _driver_version(self, buffer: Any, _size: Any) -> None:
        buffer.value = DRIVER_VERSION.encode()

    def _cuda_version(self, version: Any) -> None:
        version.value = CUDA_VERSION

    def _create_event_set(self, event_set: Any) -> None:
        address = next(self._addresses)
        self._event_sets[address] = EventSet()
        _point(event_set, address)

    def _register(self, handle: Any, types: Any, event_set: Any) -> int | None:
        gpu = self._whole(handle)
        if types.value & ~pynvml.nvmlEventTypeXidCriticalError:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        fault = self._fault(gpu, "nvmlDeviceRegisterEvents")
        if fault is None:
            self._event_sets[_address(event_set)].register(gpu, self._driver.now())
        return fault

    def _wait(self, event_set: Any, data: Any, timeout_ms: Any) -> int | None:
        events = self._event_sets[_address(event_set)]
        for _ in range(1 + int(timeout_ms.value / 1000 / EVENT_POLL)):
            if event := events.next(self._driver.now()):
                gpu, data.eventData = event
                data.eventType = pynvml.nvmlEventTypeXidCriticalError
                _point(data.device, self._handles[gpu])
                data.gpuInstanceId = data.computeInstanceId = NO_INSTANCE
                return None
            self._driver.sleep(EVENT_POLL)
        return int(pynvml.NVML_ERROR_TIMEOUT)

    def _free_event_set(self, event_set: Any) -> None:
        del self._event_sets[_address(event_set)]


SYSTEM_FUNCTIONS = {
    "nvmlShutdown": "_shutdown",
    "nvmlDeviceGetCount_v2": "_count",
    "nvmlDeviceGetHandleByIndex_v2": "_handle",
    "nvmlDeviceGetMigDeviceHandleByIndex": "_mig_handle",
    "nvmlGpmSampleAlloc": "_gpm_allocate",
    "nvmlGpmSampleFree": "_gpm_free",
    "nvmlGpmSampleGet": "_gpm_fill",
    "nvmlGpmMigSampleGet": "_gpm_fill_mig",
    "nvmlGpmMetricsGet": "_gpm_compare",
    "nvmlSystemGetDriverVersion": "_driver_version",
    "nvmlSystemGetNVMLVersion": "_driver_version",
    "nvmlSystemGetCudaDriverVersion_v2": "_cuda_version",
    "nvmlEventSetCreate": "_create_event_set",
    "nvmlDeviceRegisterEvents": "_register",
    "nvmlEventSetWait_v2": "_wait",
    "nvmlEventSetFree": "_free_event_set",
}


@contextmanager
def installed(driver: SimulatedDriver) -> Iterator[SimulatedDriver]:
    """Start the simulated driver as pynvml's library within the context."""
    cache = pynvml._nvmlGetFunctionPointer_cache  # noqa: SLF001  # pynvml has no public way to replace the library
    with ExitStack() as stack:
        stack.callback(_exchange, pynvml.nvmlLib, dict(cache), pynvml._nvmlLib_refcount)  # noqa: SLF001 - as above
        _exchange(SimulatedLibrary(driver), {}, 0)
        for worker in driver.workers:
            stack.enter_context(worker)
        yield driver


def _exchange(library: object, cache: dict[str, Any], connections: int) -> None:
    with pynvml.libLoadLock:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001  # it caches the other library's functions
        pynvml._nvmlGetFunctionPointer_cache.update(cache)  # noqa: SLF001 - as above
        pynvml._nvmlLib_refcount = connections  # noqa: SLF001 - as above


def _address(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


def _point(handle: Any, address: int) -> None:
    """Set an opaque handle, which is a pointer, to the address. The target is never dereferenced."""
    ctypes.c_void_p.from_buffer(handle).value = address
