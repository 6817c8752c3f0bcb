"""What a rank gets done: its steps, and the seconds of its training thread and of its GPU by phase."""

from __future__ import annotations

from itertools import accumulate

from rankscope import record
from rankscope_exporter.lines import Values
from rankscope_exporter.rank_metric import RANK_LABELS, RankHistogram, counter, gauge, nonzero
from rankscope_exporter.run_directory import Rank

BUCKETS = tuple(("_bucket", bound) for bound in (*map(str, record.STEP_BOUNDS), "+Inf"))


def _step_seconds(rank: Rank) -> Values:
    buckets = dict(zip(BUCKETS, accumulate(rank.snapshot.many("step_buckets")), strict=True))
    return {**buckets, ("_count", ""): buckets[BUCKETS[-1]], ("_sum", ""): rank.snapshot["step_seconds"]}


def _phase_since(rank: Rank) -> Values:
    snapshot = rank.snapshot
    return {snapshot.phase: snapshot.unix(snapshot.phase_since)} if snapshot.alive else None


METRICS = (
    counter(
        "steps",
        "Training steps that the rank has finished: optimizer steps, or calls of `rankscope.step()`.",
        lambda rank: rank.snapshot["steps"],
    ),
    counter(
        "micro_steps",
        "Backward passes: more than steps where gradients are accumulated.",
        nonzero("micro_steps"),
    ),
    counter(
        "samples",
        "Samples that the rank has trained on, by the batches of its DataLoader or `rankscope.step(samples=…)`.",
        nonzero("samples"),
    ),
    counter(
        "tokens",
        "Tokens that the rank has trained on, by the `input_ids` of its batches or `rankscope.step(tokens=…)`.",
        nonzero("tokens"),
    ),
    RankHistogram(
        "histogram",
        "rankscope_rank_step_seconds",
        "Time from the end of one training step to the end of the next.",
        RANK_LABELS,
        values=_step_seconds,
    ),
    counter(
        "phase_seconds",
        "The training thread's time by phase; the phases partition it: `startup`, `data_wait`, `h2d_copy`, `forward`, "
        "`backward`, `collective_wait`, `optimizer`, `checkpoint`, `evaluation`, `other`, and the user's own.",
        lambda rank: rank.snapshot.phase_seconds,
        "phase",
    ),
    gauge(
        "phase_since_timestamp_seconds",
        "The phase that the rank is in, and since when in unix time.",
        _phase_since,
        "phase",
    ),
    gauge(
        "last_progress_timestamp_seconds",
        "When a probe last saw the training thread do anything, in unix time.",
        lambda rank: rank.snapshot.unix(rank.snapshot.last_progress),
    ),
    counter(
        "device_seconds",
        "The GPU's time by the same phases, from CUDA events in the training thread's stream, of the steps that were "
        "measured: all that last a second or longer, of shorter ones about one a second. Their sum is the time that "
        "was observed, so use it as a share of that. A phase arrives as a whole when it has ended.",
        lambda rank: rank.snapshot.device_seconds,
        "phase",
    ),
)
