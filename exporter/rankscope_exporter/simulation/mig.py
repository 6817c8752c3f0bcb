"""The MIG devices that a simulated GPU is split into, by profiles such as 3g.20gb."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.models import GIB, GpuModel
from rankscope_exporter.simulation.timeline import State

PROFILE = re.compile(r"([1-7])g\.(\d+)gb")
# What can be asked of a MIG device; the rest only of the whole GPU.
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
    """One compute instance that fills a GPU instance: to the functions of the library a smaller GPU."""

    parent: SimulatedGpu
    profile: str
    gpu_instance: int
    compute_instance: int = 0

    @property
    def uuid(self) -> str:
        """Of the MIG device."""
        return f"MIG-{self.gpu_instance:08x}-{self.parent.uuid.removeprefix('GPU-').partition('-')[2]}"

    @property
    def name(self) -> str:
        """The product with the profile."""
        return f"{self.parent.name} MIG {self.profile}"

    @property
    def model(self) -> GpuModel:
        """Of the parent, with the memory of the profile."""
        return replace(self.parent.model, memory=int(PROFILE.sub(r"\2", self.profile)) * GIB)

    memory_reserved = 0

    def memory_used(self, _t: float) -> int:
        """Nobody uses it: processes of a scenario belong to whole GPUs."""
        return 0

    def state(self, t: float) -> State:
        """What blocks or fails does so on the whole GPU."""
        return self.parent.state(t)


def mig_devices(gpu: SimulatedGpu) -> tuple[MigDevice, ...]:
    """Those that the GPU is split into, numbered as by the driver: GPU instances from 1 on, 0 being a whole GPU."""
    return tuple(MigDevice(gpu, profile, number) for number, profile in enumerate(gpu.model.mig, start=1))
