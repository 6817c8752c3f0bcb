"""Readings of a GPU: facts once, samples repeatedly, and the rates of its load. All travel as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """Values of a GPU that do not depend on the load. None if the driver does not report a value."""

    index: int
    uuid: str = ""
    name: str = ""
    bus_id: str = ""
    error: str = ""
    """Why the GPU does not answer. All other values are then unknown."""
    unreadable: str = ""
    """Why this process may not or cannot read the GPU, which says nothing about it."""
    is_mig: bool = False
    has_gpm: bool = False
    clock_max: float | None = None
    """Hertz of the SMs."""
    bandwidth_max: float | None = None
    """Bytes per second of the memory's bus."""
    link_max: Sequence[float | None] = (None, None)
    """Generation and lanes of the PCIe link."""
    power_limit: float | None = None
    power_limit_default: float | None = None
    temperature_max: float | None = None
    """Degrees Celsius at which the GPU slows down."""
    nvlinks: Sequence[bool] = ()
    """Whether each NVLink is up."""
    fabric: Sequence[str] = ()
    """State and status of the registration with an NVSwitch fabric; empty if there is none."""
    persistence: str = ""
    compute_mode: str = ""
    recovery_action: str | None = None
    uncorrected: float | None = None
    """Uncorrected memory errors since the driver was loaded."""
    is_remapping_pending: float | None = None
    is_remapping_failed: float | None = None
    is_retirement_pending: float | None = None
    retired_pages: float | None = None
    memory_used: float | None = None
    """Bytes, without those that the driver reserves; None if a process is listed to which they may belong."""
    pids: Sequence[int] | None = None
    """Processes with a compute context."""


@dataclass(frozen=True)
class Sample:
    """One GPU at a time of the monotonic clock in seconds, which all processes share."""

    at: float
    clock: float | None = None
    reasons: Sequence[str] | None = None
    link: Sequence[float | None] = (None, None)
    temperature: float | None = None
    margin: float | None = None
    """Degrees Celsius until the GPU slows down."""
    pids: Sequence[int] | None = None


@dataclass(frozen=True)
class Load:
    """The load of one GPU: rates by name, and when it computed, by the monotonic clock."""

    rates: Mapping[str, float] = field(default_factory=dict)
    """`matmul` in floating-point operations per second, `memory_bandwidth` in bytes per second."""
    spans: Sequence[tuple[float, float]] = ()
    """The begin and end of each kind of work."""
    not_run: str = ""
    """Why nothing was measured: no torch, no CUDA, MIG. Empty if the load ran or broke."""
    failure: str = ""
    """Why the load broke on this GPU, such as a hang or an error of CUDA."""


@dataclass(frozen=True)
class Gpu:
    """Everything that is known of one GPU."""

    facts: Facts
    load: Load = field(default_factory=Load)
    samples: Sequence[Sample] = ()
    xids: Sequence[int] = ()
    """XIDs that the driver has reported during the check."""

    @property
    def loaded(self) -> Sequence[Sample]:
        """Return the samples under load: within the work, and while the driver does not call the GPU idle."""
        within = (s for s in self.samples if any(begin <= s.at <= end for begin, end in self.load.spans))
        return [sample for sample in within if "gpu_idle" not in (sample.reasons or ())]
