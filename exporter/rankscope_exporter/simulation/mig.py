"""MIG devices of a split simulated GPU, by profiles such as 3g.20gb."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.models import GIB, GpuModel
from rankscope_exporter.simulation.timeline import State

PROFILE = re.compile(r"([1-7])g\.(\d+)gb")
# Functions that MIG devices support. The others need the whole GPU.
SYMBOLS = frozenset(
    {
        "nvmlDeviceGetName",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetComputeInstanceId",
    }
)


@dataclass(frozen=True)
class MigDevice:
    """One compute instance that fills a GPU instance. The library's functions treat it as a smaller GPU."""

    parent: SimulatedGpu
    profile: str
    gpu_instance: int
    compute_instance: int = 0

    @property
    def uuid(self) -> str:
        """UUID of the MIG device."""
        return f"MIG-{self.gpu_instance:08x}-{self.parent.uuid.removeprefix('GPU-').partition('-')[2]}"

    @property
    def name(self) -> str:
        """Product name with the profile."""
        return f"{self.parent.name} MIG {self.profile}"

    @property
    def model(self) -> GpuModel:
        """The parent's model with the memory of the profile."""
        return replace(self.parent.model, memory=int(PROFILE.sub(r"\2", self.profile)) * GIB)

    memory_reserved = 0

    def memory_used(self, _t: float) -> int:
        """Return 0: processes of a scenario use whole GPUs."""
        return 0

    def state(self, t: float) -> State:
        """Return the whole GPU's state, which includes blocking and failing calls."""
        return self.parent.state(t)


def mig_devices(gpu: SimulatedGpu) -> tuple[MigDevice, ...]:
    """Return the GPU's MIG devices. As in the driver, GPU instances start at 1; 0 is a whole GPU."""
    return tuple(MigDevice(gpu, profile, number) for number, profile in enumerate(gpu.model.mig, start=1))
