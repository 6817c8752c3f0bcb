"""A rank's steps, and the time of its training thread and of its GPU by phase."""

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
        "Training steps that the rank has finished: optimizer steps or calls of `rankscope.step()`; backward passes if "
        f"{layout.PASSES_WITHOUT_STEP} of them had neither. `step_marker` says which.",
        lambda rank: rank.snapshot["steps"],
    ),
    RANK.counter(
        "micro_steps_total",
        "Backward passes: more than steps if gradients are accumulated.",
        nonzero("micro_steps"),
    ),
    RANK.counter(
        "samples_total",
        "Samples that the rank has trained on, by the batches of its DataLoader or `rankscope.step(samples=…)`. Absent "
        "if a batch does not show its samples, and on ranks that train on another rank's batches.",
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
        f"The training thread's time by phase: {NAMES}, and the user's own. Every moment is in exactly one phase.",
        lambda rank: rank.snapshot.phase_seconds,
        "phase",
    ),
    RANK.gauge(
        "phase_since_timestamp_seconds",
        "Start of the rank's current phase, in unix time.",
        _phase_since,
        "phase",
    ),
    RANK.gauge(
        "last_progress_timestamp_seconds",
        "Last time that a probe saw activity of the training thread, in unix time.",
        lambda rank: rank.snapshot.unix(rank.snapshot.last_progress),
    ),
    RANK.counter(
        "device_seconds_total",
        "The GPU's time by the same phases, from CUDA events in the training thread's stream, in measured steps: all "
        "steps of a second or longer, and about one shorter step per second, the same ones on all ranks. The phases "
        "sum to the measured time, so use their share of it. Added when the GPU finishes a step; absent without a GPU.",
        lambda rank: rank.snapshot.device_seconds,
        "phase",
    ),
    RANK.counter(
        "device_steps_total",
        "Steps that were measured on the GPU; absent without a GPU.",
        nonzero("device_steps"),
    ),
    RANK.counter(
        "device_dry_seconds_total",
        "Part of `rankscope_rank_device_seconds_total` in which the GPU was dry: it had finished all issued work and "
        "waited for the host to issue more. Only for phases in which the host issues work: `other`, the computing ones "
        "and the user's own; all other phases are waits themselves.",
        _dry_seconds,
        "phase",
    ),
    RANK.counter(
        "device_waits_total",
        "Waits of the host for the GPU: synchronizations and values that were read (`.item()`). Absent while there was "
        "none.",
        nonzero("device_waits"),
    ),
)
