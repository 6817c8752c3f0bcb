"""What each phase of the load must have done to each counter: a row a phase and metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from validation.gpu_check.exporter import Scrape, values
from validation.gpu_check.report import Check, missing, number

PART = "known load"
Known = Literal["busy_seconds", "bytes", "wall_seconds"]


@dataclass(frozen=True)
class Effect:
    """A counter's growth over a phase: between `least` and `most` of what is known, give or take `slack`."""

    phase: str
    metric: str
    """Without `rankscope_gpu_`."""
    least: float = 0.0
    most: float = 0.0
    known: Known = "busy_seconds"
    labels: Mapping[str, str] = field(default_factory=dict)
    slack: float = 0.0


FULL, HALF, BURSTS = "bf16", "bf16, half the time", "bf16, 50 ms every second"
RECEIVE, TRANSMIT = {"direction": "receive"}, {"direction": "transmit"}


def _pipe(phase: str, pipe: str, least: float, most: float) -> Effect:
    return Effect(phase, "pipe_active_seconds_total", least, most, labels={"pipe": pipe}, slack=0.1)


# Shares of a product's time: an 8192³ one keeps all SMs but those of its last wave, and most of the tensor cores, busy.
# Slack: a driver's sample covers up to a second, so half of one at either end of a phase.
EFFECTS: tuple[Effect, ...] = (
    Effect(FULL, "busy_seconds_total", 0.97, 1.03, slack=0.5),
    Effect(HALF, "busy_seconds_total", 0.9, 1.1, slack=0.5),
    Effect(BURSTS, "busy_seconds_total", 0.8, 1.3, slack=0.3),
    Effect("fp32", "busy_seconds_total", 0.95, 1.03, slack=0.5),
    Effect("idle", "busy_seconds_total", slack=0.05),
    Effect("copy", "memory_busy_seconds_total", 0.3, 1.05, slack=0.5),
    Effect("idle", "memory_busy_seconds_total", slack=0.05),
    Effect(FULL, "graphics_active_seconds_total", 0.95, 1.03, slack=0.5),
    Effect(HALF, "graphics_active_seconds_total", 0.9, 1.1, slack=0.5),
    Effect(BURSTS, "graphics_active_seconds_total", 0.8, 1.3, slack=0.3),
    Effect("idle", "graphics_active_seconds_total", slack=0.1),
    Effect(FULL, "sm_active_seconds_total", 0.85, 1.03, slack=0.5),
    Effect(HALF, "sm_active_seconds_total", 0.8, 1.1, slack=0.5),
    Effect(BURSTS, "sm_active_seconds_total", 0.7, 1.3, slack=0.3),
    Effect("idle", "sm_active_seconds_total", slack=0.1),
    Effect(FULL, "sm_occupancy_seconds_total", 0.05, 1.0),
    Effect(FULL, "tensor_active_seconds_total", 0.4, 1.03, slack=0.1),
    Effect(HALF, "tensor_active_seconds_total", 0.35, 1.1, slack=0.1),
    Effect("fp32", "tensor_active_seconds_total", 0.0, 0.02, slack=0.1),
    _pipe(FULL, "tensor_hmma", 0.4, 1.03),
    _pipe("fp32", "tensor_hmma", 0.0, 0.02),
    _pipe("fp32", "fp32", 0.3, 1.03),
    _pipe(FULL, "tensor_imma", 0.0, 0.02),
    _pipe(FULL, "tensor_dfma", 0.0, 0.02),
    _pipe(FULL, "fp64", 0.0, 0.02),
    Effect("copy", "dram_active_seconds_total", 0.5, 1.03, slack=0.1),
    Effect("idle", "dram_active_seconds_total", slack=0.1),
    # If it were counted in anything but nanoseconds this would be far off, or 0 beside nvidia-smi's.
    Effect(FULL, "throttled_seconds_total", 0.0, 1.03, "wall_seconds", {"reason": "sw_power_cap"}),
    Effect("upload", "gpm_pcie_bytes_total", 0.9, 1.2, "bytes", RECEIVE),
    Effect("upload", "gpm_pcie_bytes_total", 0.0, 0.1, "bytes", TRANSMIT),
    Effect("upload once", "gpm_pcie_bytes_total", 0.8, 1.3, "bytes", RECEIVE, slack=2**26),
    Effect("upload", "pcie_bytes_total", 0.9, 1.2, "bytes", RECEIVE),
    Effect("upload", "pcie_bytes_total", 0.0, 0.1, "bytes", TRANSMIT),
)

# Around a phase, within the load's pauses: the exporter reads once a second, and the driver's ring may lag by one.
BEFORE, AFTER = 1.0, 3.0


def around(done: Mapping[str, Any], scrapes: Sequence[Scrape], scale: float = 1.0) -> list[Scrape]:
    """The scrapes from just before a phase to when its last reading is in."""
    start, end = done["began"] - BEFORE * scale, done["ended"] + AFTER * scale
    return [scrape for scrape in scrapes if start <= scrape.at <= end]


def judge_effects(
    phases: Mapping[str, Mapping[str, Any]], scrapes: Sequence[Scrape], uuid: str, scale: float = 1.0
) -> Iterator[Check]:
    """Every effect, for the GPU with this UUID."""
    for effect in EFFECTS:
        done = phases.get(effect.phase)
        about = f"{effect.phase}: {' '.join([effect.metric, *effect.labels.values()])}"
        if done is None:
            yield Check(PART, about, "failed", note="the load did not come to this phase")
        else:
            yield _judge(about, effect, done, around(done, scrapes, scale), uuid)


def _judge(about: str, effect: Effect, done: Mapping[str, Any], scrapes: Sequence[Scrape], uuid: str) -> Check:
    counts = values(scrapes, f"rankscope_gpu_{effect.metric}", uuid=uuid, **effect.labels)
    known = float(done[effect.known])
    if len(counts) < 2:
        return Check(PART, about, missing(False, False), theirs=number(known), note=f"{effect.known} of the load")
    grown = counts[-1] - counts[0]
    low, high = effect.least * known - effect.slack, effect.most * known + effect.slack
    note = f"{effect.known}; expected {number(max(0.0, low))} to {number(high)}"
    return Check(PART, about, "ok" if low <= grown <= high else "differs", number(grown), number(known), note)
