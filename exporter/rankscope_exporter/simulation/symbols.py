"""Registry of simulated functions by library symbol, as pynvml names it.

Each takes the GPU, the time, and the call's ctypes arguments after the handle, unwrapped from `byref`. It fills them in
and returns an NVML code, or None for success.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.models import GpuModel

GpuFunction = Callable[..., int | None]
GPU_FUNCTIONS: dict[str, GpuFunction] = {}


def _always(_model: GpuModel) -> bool:
    return True


def symbol(
    *names: str, supported_by: Callable[[GpuModel], bool] = _always
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a function under its symbols. It fails as unsupported unless `supported_by` accepts the GPU's model."""

    def register(function: GpuFunction) -> GpuFunction:
        @functools.wraps(function)
        def supported(gpu: Any, t: float, *arguments: Any) -> int | None:
            return function(gpu, t, *arguments) if supported_by(gpu.model) else int(pynvml.NVML_ERROR_NOT_SUPPORTED)

        GPU_FUNCTIONS.update(dict.fromkeys(names, supported))
        return supported

    return register


def values(
    table: Mapping[str, Callable[[Any, float], object]], supported_by: Callable[[GpuModel], bool] = _always
) -> None:
    """Register functions that write one value, or each one of a tuple, to the call's last arguments."""
    for name, value in table.items():
        symbol(name, supported_by=supported_by)(functools.partial(_write, value))


def _write(value: Callable[[Any, float], object], gpu: SimulatedGpu, t: float, *arguments: Any) -> None:
    found = value(gpu, t)
    several = found if isinstance(found, tuple) else (found,)
    for argument, one in zip(arguments[-len(several) :], several, strict=True):
        argument.value = one


def structs(
    table: Mapping[str, Callable[[Any, float], Mapping[str, object]]],
    supported_by: Callable[[GpuModel], bool] = _always,
) -> None:
    """Register functions that set fields of the struct in the call's last argument."""
    for name, fields in table.items():
        symbol(name, supported_by=supported_by)(functools.partial(_fill, fields))


def _fill(fields: Callable[[Any, float], Mapping[str, object]], gpu: SimulatedGpu, t: float, *arguments: Any) -> None:
    for name, value in fields(gpu, t).items():
        setattr(arguments[-1], name, value)
