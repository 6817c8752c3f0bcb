"""Simulated GPU models, with the capabilities of each."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
ARCHITECTURES = ("turing", "ampere", "hopper", "blackwell")


@dataclass(frozen=True)
class GpuModel:
    """A GPU model. The defaults follow the data sheet of an H100 SXM5."""

    name: str = "NVIDIA H100 80GB HBM3"
    architecture: str = "hopper"
    memory: int = 80 * GIB
    power_idle: float = 70.0
    power_max: float = 700.0
    sm_clock: float = 1980.0
    memory_clock: float = 2619.0
    memory_bus: int = 5120
    """Bits."""
    video_clock: float = 1545.0
    pcie_generation: int = 5
    nvlinks: int = 18
    encodes: bool = False
    """True if it has a video encoder. GPUs for training have none."""
    mig: tuple[str, ...] = ()
    """Profiles of its MIG instances, such as 1g.10gb."""

    def since(self, architecture: str) -> bool:
        """Return whether the model has this architecture or a later one."""
        return ARCHITECTURES.index(self.architecture) >= ARCHITECTURES.index(architecture)


H100 = GpuModel()
A100 = GpuModel(
    name="NVIDIA A100-SXM4-40GB",
    architecture="ampere",
    memory=40 * GIB,
    power_idle=52.0,
    power_max=400.0,
    sm_clock=1410.0,
    memory_clock=1215.0,
    video_clock=1290.0,
    pcie_generation=4,
    nvlinks=12,
)
T4 = GpuModel(
    name="Tesla T4",
    architecture="turing",
    memory=16 * GIB,
    power_idle=10.0,
    power_max=70.0,
    sm_clock=1590.0,
    memory_clock=5001.0,
    memory_bus=256,
    video_clock=1470.0,
    pcie_generation=3,
    nvlinks=0,
    encodes=True,
)
B200 = GpuModel(
    name="NVIDIA B200",
    architecture="blackwell",
    memory=180 * GIB,
    power_idle=140.0,
    power_max=1000.0,
    sm_clock=1965.0,
    memory_clock=3996.0,
    memory_bus=8192,
)
MODELS = {"H100": H100, "A100": A100, "T4": T4, "B200": B200}
