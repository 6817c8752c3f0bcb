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


def numbers(table: Mapping[str, Callable[[SimulatedGpu, float], int]]) -> None:
    """Register functions that write one number, computed by the table, to the call's last argument."""
    for name, number in table.items():
        symbol(name)(functools.partial(_write, number))


def _write(number: Callable[[SimulatedGpu, float], int], gpu: SimulatedGpu, t: float, *arguments: Any) -> None:
    arguments[-1].value = number(gpu, t)
