"""A simulated NVIDIA driver under the real pynvml: its GPUs follow a scenario and the ranks that run on them.

`load_scenario` (scenario.py) → `SimulatedDriver` (driver.py) → `install` (library.py). The daemon imports this package
only with `--simulate`. Nothing is imported here, so that a launcher can ask for `simulated_uuid` at no cost.
"""

from __future__ import annotations


def simulated_uuid(index: int, machine: int = 0) -> str:
    """The UUID of the simulated GPU with this index: always the same, so CUDA_VISIBLE_DEVICES can name it."""
    return f"GPU-51300000-{machine:04x}-4000-8000-{index:012x}"
