"""Compare each metric with nvidia-smi at rest and under a known load, and counters with the work of the load.

The cost of the exporter is measured at rest, with all collectors and two scrapes a second.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from testing.processes import MEBIBYTE, cpu_seconds, resident_bytes
from testing.servers import Server
from validation.gpu_check import dry_run
from validation.gpu_check.compare import compare, judge_invariants
from validation.gpu_check.exporter import Scrape, recorded, running, values
from validation.gpu_check.report import Check, ok_if, show

REST = 30.0  # seconds in which the cost is measured
BATCH = 4  # pieces of work between two synchronizations
GAP = 4.0  # seconds of rest before each phase
BEFORE, AFTER = 1.0, 3.0  # seconds around a phase: readings are up to a second old, and samples another
SETTLE = 5.0  # seconds after which clocks and power under load are steady


@dataclass(frozen=True)
class Phase:
    """Work for `on` seconds and rest for `off` seconds, repeated for `seconds`."""

    name: str
    work: str
    seconds: float
    on: float = 0.5
    off: float = 0.0


@dataclass(frozen=True)
class Done:
    """The work of a phase: unix times, seconds in which the device was busy, and bytes."""

    phase: str
    began: float
    ended: float
    busy: float
    bytes: float


FULL, HALF, BURSTS = "product", "product, half the time", "product, 50 ms each second"
PHASES = (
    Phase(FULL, "product", 20),
    Phase(HALF, "product", 20, on=0.1, off=0.1),
    Phase(BURSTS, "product", 20, on=0.05, off=0.95),
    Phase("copy", "copy", 8),
    Phase("upload", "upload", 6),
    Phase("idle", "product", 10, on=0.0, off=10),
)

# What differed on the first real GPU, and was mended.
AGAIN = tuple(replace(phase, seconds=9.0) for phase in PHASES if phase.name in (FULL, BURSTS, "idle"))
SIZES = {"size": 64, "chunk": 2**16} if dry_run.IS_DRY else {}

Known = Literal["busy", "bytes", "window", "joules", "bytes per second"]


@dataclass(frozen=True)
class Effect:
    """A counter's growth over a phase (a rate's maximum): `least` to `most` times the known value, ± `slack`."""

    phase: str
    metric: str
    least: float = 0.0
    most: float = 0.0
    slack: float = 0.0
    known: Known = "busy"
    label: str = ""
    """The value of the label that distinguishes this series from others of the metric."""


# A matrix product of 8192³ keeps all SMs busy except in its last wave. A sample of the driver covers up to a second, so
# half a second at each end of a phase is uncertain.
EFFECTS: tuple[Effect, ...] = (
    Effect(FULL, "busy_seconds_total", 0.97, 1.03, 0.5),
    Effect(HALF, "busy_seconds_total", 0.9, 1.1, 0.5),
    Effect(BURSTS, "busy_seconds_total", 0.8, 1.3, 0.3),
    Effect("idle", "busy_seconds_total", 0, 0, 0.05),
    Effect("copy", "memory_busy_seconds_total", 0.3, 1.05, 0.5),
    Effect(BURSTS, "graphics_active_seconds_total", 0.8, 1.3, 0.3),
    Effect(FULL, "sm_active_seconds_total", 0.85, 1.03, 0.5),
    Effect(FULL, "sm_occupancy_seconds_total", 0.05, 1.0),
    Effect(FULL, "tensor_active_seconds_total", 0.4, 1.03, 0.1),
    Effect("copy", "tensor_active_seconds_total", 0, 0, 0.1),
    Effect(FULL, "pipe_active_seconds_total", 0.4, 1.03, 0.1, label="tensor_hmma"),
    Effect("copy", "dram_active_seconds_total", 0.5, 1.03, 0.1),
    Effect("idle", "dram_active_seconds_total", 0, 0, 0.1),
    Effect("upload", "gpm_pcie_bytes_total", 0.9, 1.2, 0, "bytes", "receive"),
    # The exporter serves these only above 4 GiB: one side means that the driver's counter wraps at 32 bits.
    Effect("upload", "pcie_bytes_total", 0.9, 1.2, 0, "bytes", "receive"),
    Effect("upload", "pcie_throughput_bytes_per_second", 0.75, 1.25, 0, "bytes per second", "receive"),
    Effect(FULL, "energy_joules_total", 0.9, 1.1, 0, "joules"),
    Effect(FULL, "state_seconds_total", 1.0, 1.0, 2.0, "window"),
    Effect(HALF, "last_busy_timestamp_seconds", 0.8, 1.2, 1.0, "window"),
    Effect("idle", "last_busy_timestamp_seconds", 0, 0, 1.0),
)


def check(argument: str = "") -> Iterator[Check]:
    """Yield the cost, the comparisons at rest and under load, the effects of the load, and the invariants.

    With `again`, only the phases that differed before, for less time and without the cost.
    """
    with running() as (exporter, _), recorded(exporter) as scrapes:
        yield from compare("at rest", scrapes)
        if argument != "again":
            yield from costs(exporter, scrapes)
        import torch

        works = make_works(torch, dry_run.DEVICE, **SIZES)
        synchronize = (lambda: None) if dry_run.IS_DRY else torch.cuda.synchronize
        for phase in AGAIN if argument == "again" else PHASES:
            yield from run_phase(phase, works[phase.work], synchronize, scrapes)
        yield from judge_invariants(scrapes)
        logged = [line for line in exporter.log.read_text(errors="replace").splitlines() if "level=info" not in line]
        yield Check("warnings and errors logged", ok_if(not logged), str(len(logged)), note=" / ".join(logged[:5]))


def costs(exporter: Server, scrapes: Sequence[Scrape]) -> Iterator[Check]:
    pid, first = exporter.pid or 0, len(scrapes)
    before, began = cpu_seconds(pid), time.monotonic()
    time.sleep(REST)
    ratio = (cpu_seconds(pid) - before) / (time.monotonic() - began)
    yield Check("exporter: CPU time", "measured", f"{100 * ratio:.2f}% of a core")
    seconds = [1e6 * scrape.seconds for scrape in scrapes[first:]]
    shown = f"{statistics.median(seconds):.0f} µs, at most {max(seconds):.0f} µs"
    yield Check("exporter: a scrape", "measured", shown, note=f"{len(scrapes[-1].series)} series")
    yield Check("exporter: resident memory", "measured", f"{resident_bytes(pid) / MEBIBYTE:.1f} MiB")


def make_works(torch: Any, device: str, size: int = 8192, chunk: int = 2**30) -> dict[str, Callable[[], int]]:
    """Return functions that do a piece of work and return its bytes: a matrix product of this size, and copies."""
    left, right, product = (torch.randn(size, size, device=device).bfloat16() for _ in range(3))
    source, target = (torch.ones(chunk, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(chunk, dtype=torch.uint8, pin_memory=device == "cuda")

    def multiply() -> int:
        torch.matmul(left, right, out=product)
        return 0

    def copy(tensor: Any) -> int:
        target.copy_(tensor, non_blocking=True)
        return chunk

    works: dict[str, Callable[[], int]] = {
        "product": multiply,
        "copy": lambda: copy(source),
        "upload": lambda: copy(host),
    }
    for work in works.values():  # loads the kernels
        work()
    return works


def run_phase(
    phase: Phase, work: Callable[[], int], synchronize: Callable[[], Any], scrapes: Sequence[Scrape]
) -> Iterator[Check]:
    """Rest, run a phase, and yield its effects, and in the first phase a comparison under load."""
    time.sleep(dry_run.shortened(GAP))
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(_compare, scrapes) if phase.name == FULL else None
        done = run(phase, work, synchronize)
    yield from pending.result() if pending else ()
    yield Check(f"{phase.name}: busy seconds, bytes", "measured", f"{show(done.busy)}, {show(done.bytes)}")
    time.sleep(max(0.0, done.ended + dry_run.shortened(AFTER) - time.time()))
    yield from judge_effects(done, scrapes)


def _compare(scrapes: Sequence[Scrape]) -> list[Check]:
    time.sleep(dry_run.shortened(SETTLE))
    return list(compare("under load", scrapes))


def run(phase: Phase, work: Callable[[], int], synchronize: Callable[[], Any]) -> Done:
    """Run a phase. The device is busy from the first piece of work to the end of the synchronization."""
    synchronize()
    began, busy, done = time.time(), 0.0, 0
    while time.time() < began + dry_run.shortened(phase.seconds):
        start = time.perf_counter()
        while time.perf_counter() - start < phase.on:
            done += sum(work() for _ in range(BATCH))
            synchronize()
        busy += time.perf_counter() - start
        time.sleep(phase.off)
    return Done(phase.name, began, time.time(), busy, done)


def judge_effects(done: Done, scrapes: Sequence[Scrape]) -> Iterator[Check]:
    """Judge the effects of a phase with the scrapes around it."""
    around = [scrape for scrape in scrapes if done.began - BEFORE <= scrape.at <= done.ended + AFTER]
    watts = values(around, "gpu_power_watts")[1:]
    lengths = [after.at - before.at for before, after in itertools.pairwise(around)]
    known: dict[Known, float] = {
        "busy": done.busy,
        "bytes": done.bytes,
        "window": sum(lengths),
        "joules": sum(power * length for power, length in zip(watts, lengths, strict=False)),
        "bytes per second": done.bytes / done.busy if done.busy else 0.0,
    }
    for effect in (effect for effect in EFFECTS if effect.phase == done.phase):
        yield _judge(effect, known[effect.known], around)


def _judge(effect: Effect, known: float, scrapes: Sequence[Scrape]) -> Check:
    about = f"{effect.phase}: {effect.metric} {effect.label}".strip()
    seen = values(scrapes, f"gpu_{effect.metric}", *effect.label.split())
    if len(seen) < 2:
        return Check(about, "one side", reference=show(known), note=effect.known)
    ours = max(seen) if effect.known == "bytes per second" else seen[-1] - seen[0]
    low, high = effect.least * known - effect.slack, effect.most * known + effect.slack
    return Check(about, ok_if(low <= ours <= high), show(ours), f"{show(low)} to {show(high)}", effect.known)
