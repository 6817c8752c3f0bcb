"""What a rank gets done: its steps, and the seconds of its training thread and of its GPU by phase."""

from __future__ import annotations

from itertools import accumulate

from rankscope.record import layout, phases
from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.ranks.metric import RANK, nonzero
from rankscope_exporter.ranks.rank import Rank

BUCKETS = tuple(("_bucket", bound) for bound in (*map(str, layout.STEP_BOUNDS), "+Inf"))
NAMES = ", ".join(f"`{name}`" for name in phases.NAMES)


def _step_seconds(rank: Rank) -> Values:
    buckets = dict(zip(BUCKETS, accumulate(rank.snapshot.many("step_buckets")), strict=True))
    return {**buckets, ("_count", ""): buckets[BUCKETS[-1]], ("_sum", ""): rank.snapshot["step_seconds"]}


def _phase_since(rank: Rank) -> Values:
    snapshot = rank.snapshot
    return {snapshot.phase: snapshot.unix(snapshot.phase_since)} if snapshot.alive else None


def _dry_seconds(rank: Rank) -> Values:
    return {phase: dry for phase, dry in rank.snapshot.device_dry_seconds.items() if dry or phase in phases.ISSUING}


METRICS = (
    RANK.counter(
        "steps_total",
        "Training steps that the rank has finished: optimizer steps, or calls of `rankscope.step()`; where there was "
        f"neither in {layout.PASSES_WITHOUT_STEP} backward passes, each of them. `step_marker` says which.",
        lambda rank: rank.snapshot["steps"],
    ),
    RANK.counter(
        "micro_steps_total",
        "Backward passes: more than steps where gradients are accumulated.",
        nonzero("micro_steps"),
    ),
    RANK.counter(
        "samples_total",
        "Samples that the rank has trained on, by the batches of its DataLoader or `rankscope.step(samples=…)`. "
        "Absent where a batch does not tell its samples, and on ranks that train on "
        "the batches of another rank.",
        nonzero("samples"),
    ),
    RANK.counter(
        "tokens_total",
        "Tokens that the rank has trained on, by the `input_ids` of its batches or `rankscope.step(tokens=…)`.",
        nonzero("tokens"),
    ),
    RANK.histogram(
        "step_seconds",
        "Time from the end of one training step to the end of the next.",
        _step_seconds,
    ),
    RANK.counter(
        "phase_seconds_total",
        f"The training thread's time by phase; the phases partition it: {NAMES}, and the user's own.",
        lambda rank: rank.snapshot.phase_seconds,
        "phase",
    ),
    RANK.gauge(
        "phase_since_timestamp_seconds",
        "The phase that the rank is in, and since when in unix time.",
        _phase_since,
        "phase",
    ),
    RANK.gauge(
        "last_progress_timestamp_seconds",
        "When a probe last saw the training thread do anything, in unix time.",
        lambda rank: rank.snapshot.unix(rank.snapshot.last_progress),
    ),
    RANK.counter(
        "device_seconds_total",
        "The GPU's time by the same phases, from CUDA events in the training thread's stream, of the steps that were "
        "measured, the same ones on every rank: all that last a second or longer, of shorter ones about one a second. "
        "Their sum is the time that was observed, so use it as a share of that. Added when the GPU has done a step; "
        "absent without one.",
        lambda rank: rank.snapshot.device_seconds,
        "phase",
    ),
    RANK.counter(
        "device_steps_total",
        "Steps that were measured so; absent without a GPU.",
        nonzero("device_steps"),
    ),
    RANK.counter(
        "device_dry_seconds_total",
        "Of `rankscope_rank_device_seconds_total` what the GPU spent without anything to do: it had done all that was "
        "issued and waited for the host to issue more. Of the phases in which the host issues work, which are "
        "`other`, the computing ones and the user's own; the rest are named for what is waited for.",
        _dry_seconds,
        "phase",
    ),
    RANK.counter(
        "device_waits_total",
        "How often the host waited for the GPU: a synchronization, a value that was read (`.item()`). Absent while it "
        "never has.",
        nonzero("device_waits"),
    ),
)
