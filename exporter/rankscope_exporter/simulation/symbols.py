"""The register of simulated functions: one for each symbol of the library, by the name pynvml asks for.

Each takes the GPU, the time, and the call's ctypes arguments after the handle, already unwrapped from `byref`; it
fills them in and returns one of NVML's codes, or None for success.
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
    *names: str, of: Callable[[GpuModel], bool] = _always
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a function under its names in the library; GPUs whose model it is not `of` do not support it."""

    def register(function: GpuFunction) -> GpuFunction:
        @functools.wraps(function)
        def supported(gpu: Any, t: float, *arguments: Any) -> int | None:
            return function(gpu, t, *arguments) if of(gpu.model) else int(pynvml.NVML_ERROR_NOT_SUPPORTED)

        GPU_FUNCTIONS.update(dict.fromkeys(names, supported))
        return supported

    return register


def numbers(table: Mapping[str, Callable[[SimulatedGpu, float], int]]) -> None:
    """Register functions that write one number, which the table computes, into the call's last argument."""
    for name, number in table.items():
        symbol(name)(functools.partial(_write, number))


def _write(number: Callable[[SimulatedGpu, float], int], gpu: SimulatedGpu, t: float, *arguments: Any) -> None:
    arguments[-1].value = number(gpu, t)
