"""What one rank does now, and did over the last window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rankscope_exporter.diagnosis.facts import RankFacts
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.ranks.rank import Rank

LAGS_FROM = Thresholds().loss
"""A smaller lag is no loss: in a healthy run, too, some rank waits least."""
STEPS = 32
MINUTE = 60.0
"""Which steps are the last ones: to read a whole ring takes long."""


@dataclass(frozen=True)
class RankReport:
    """One rank. What is not known is None, or absent from its mapping."""

    rank: int
    group: str
    node: str
    gpu: str
    """Its index."""
    uuid: str
    pid: int
    """As the rank's own process knows it: in a container, that of the container."""
    is_alive: bool
    ended: str | None
    """How: `finished`, `exception`, `interrupted`, `sigterm` or `killed`."""
    ended_seconds: float | None
    """For how long it has been so."""
    phase: str | None
    """In which the training thread is now."""
    phase_seconds: float | None
    """For how long."""
    stalled_seconds: float | None
    """Since the training thread last made progress."""
    steps: int
    backward_passes: int
    """Of which a step may have several."""
    step_marker: str
    """What ends a step, such as `optimizer` or `backward_pass`; empty while there is none."""
    clock: str | None
    """By which the ratios are measured: `host` or `device`."""
    phases: Mapping[str, float]
    """Its time by phase, as ratios of the window."""
    wait_ratio: float | None
    """What it waits for others, as a ratio of the step."""
    lag_ratio: float | None
    """What the others would save if it were like them, as a ratio of the step."""
    waits_least: bool
    """Whether it lags so far that it is not chance."""
    checkpoint_seconds: float | None
    """Since its last checkpoint."""


def report_rank(rank: Rank, unix: float, facts: RankFacts | None, reading: RankReading | None) -> RankReport:
    """Return what is known of a rank at that time."""
    snapshot, info = rank.snapshot, rank.snapshot.info
    is_alive, at, saved = snapshot.alive, snapshot.read_monotonic, snapshot.unix_field("checkpoint_last_unix")
    lag = facts.lag if facts else None
    return RankReport(
        rank=int(rank.key[1]),
        group=info["group"],
        node=info["node"],
        gpu=reading.gpu.index if reading and reading.gpu else "",
        uuid=rank.uuid,
        pid=int(info["pid"]),
        is_alive=is_alive,
        ended=snapshot.exit_reason,
        ended_seconds=None if rank.exit_unix is None else max(unix - rank.exit_unix, 0.0),
        phase=snapshot.phase if is_alive else None,
        phase_seconds=max(at - snapshot.phase_since, 0.0) if is_alive else None,
        stalled_seconds=max(at - snapshot.last_progress, 0.0) if is_alive else None,
        steps=int(snapshot["steps"]),
        backward_passes=int(snapshot["micro_steps"]),
        step_marker=str(info.get("settings", {}).get("step_marker", "")),
        clock=facts.clock if facts else None,
        phases={phase: ratio for phase, ratio in facts.ratios.items() if ratio > 0.0} if facts else {},
        wait_ratio=facts.wait if facts else None,
        lag_ratio=lag,
        waits_least=lag is not None and lag > LAGS_FROM,
        checkpoint_seconds=max(unix - saved, 0.0) if saved else None,
    )


def step_seconds(ranks: Sequence[Rank]) -> float | None:
    """Return the median of the last steps. All ranks of a run have the same ones: the first speaks."""
    if not ranks:
        return None
    snapshot = ranks[0].snapshot
    steps = snapshot.steps_after(max(int(snapshot["steps"]) - STEPS, 0))
    recent = [step.seconds for step in steps if step.end > snapshot.read_monotonic - MINUTE]
    return median(recent) if recent else None
