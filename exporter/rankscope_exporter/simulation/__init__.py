"""A simulated NVIDIA driver below the real pynvml. Its GPUs follow a scenario and the ranks that run on them.

`load_scenario` (scenario.py) → `SimulatedDriver` (driver.py) → `install` (library.py). The daemon imports this package
only with `--simulate`. This module imports nothing, so that a launcher can call `simulated_uuid` at no cost.
"""

from __future__ import annotations


def simulated_uuid(index: int, machine: int = 0) -> str:
    """Return the UUID of the simulated GPU at this index. It is constant, so CUDA_VISIBLE_DEVICES can name it."""
    return f"GPU-51300000-{machine:04x}-4000-8000-{index:012x}"
