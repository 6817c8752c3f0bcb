"""What every rank on this machine does: from the records in the run directories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import Metric

from rankscope import record
from rankscope_exporter.families import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from rankscope_exporter.run_directory import LABELS, Rank, RunDirectory

RANK = ("run", "rank")
SKIP_REASONS = (
    "truncated",
    "foreign",
    "version",
    "symlink",
    "unreadable",
    "duplicate",
    "too_many_files",
    "too_many_ranks",
)


class RanksCollector:
    """Reads the records at each scrape: no thread of its own, nothing to go stale."""

    name = "ranks"
    help = "training ranks: phases, steps, collectives, life and death"

    def __init__(self, run_directory: RunDirectory) -> None:
        self._run_directory = run_directory

    def collect(self) -> Iterable[Metric]:
        """Every rank's metrics, and how many files were no records."""
        scan = self._run_directory.scan()
        yield from _life(scan.ranks)
        yield from _steps(scan.ranks)
        yield from _phases(scan.ranks)
        yield from _collectives(scan.ranks)
        skipped = GaugeMetricFamily(
            "rankscope_exporter_rank_files_skipped",
            "Files in the run directories that are not shown as a rank, by reason.",
            labels=["reason"],
        )
        for reason in SKIP_REASONS:
            skipped.add_metric([reason], scan.skipped[reason])
        yield skipped


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rankscope_rank_{name}", text, labels=[*RANK, *labels])


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"rankscope_rank_{name}", text, labels=[*RANK, *labels])


def _life(ranks: Sequence[Rank]) -> Iterable[Metric]:
    info = _gauge("info", "What the rank is and where it runs.", *LABELS[2:])
    up = _gauge("up", "1 while the rank's process lives.")
    start = _gauge("start_timestamp_seconds", "When the rank's record began, in unix time.")
    text = "How the rank ended: finished, exception, interrupted, sigterm or killed."
    exit_info = _gauge("exit_info", text, "reason")
    exit_time = _gauge("exit_timestamp_seconds", "When the rank ended, in unix time.")
    disabled = _gauge("probes_disabled", "Probes switched off in the rank after an error of their own.")
    for rank in ranks:
        snapshot = rank.snapshot
        info.add_metric([snapshot.info[label] for label in LABELS], 1)
        up.add_metric(rank.key, snapshot.alive)
        start.add_metric(rank.key, snapshot["started_unix"])
        disabled.add_metric(rank.key, len(snapshot.info.get("probes_disabled", ())))
        if snapshot.exit_reason and rank.exit_unix:
            exit_info.add_metric([*rank.key, snapshot.exit_reason], 1)
            exit_time.add_metric(rank.key, rank.exit_unix)
    return info, up, start, exit_info, exit_time, disabled


def _steps(ranks: Sequence[Rank]) -> Iterable[Metric]:
    steps = _counter("steps", "Training steps that the rank has finished.")
    text = "Time from the end of one training step to the end of the next."
    histogram = HistogramMetricFamily("rankscope_rank_step_seconds", text, labels=RANK)
    bounds = [*map(str, record.STEP_BOUNDS), "+Inf"]
    for rank in ranks:
        steps.add_metric(rank.key, rank.snapshot["steps"])
        cumulated = accumulate(rank.snapshot.many("step_buckets"))
        buckets = list(zip(bounds, cumulated, strict=True))
        histogram.add_metric(rank.key, buckets, rank.snapshot["step_seconds"])
    return steps, histogram


def _phases(ranks: Sequence[Rank]) -> Iterable[Metric]:
    seconds = _counter("phase_seconds", "The training thread's time by phase; the phases partition it.", "phase")
    since = _gauge("phase_since_timestamp_seconds", "The phase the rank is in, since when in unix time.", "phase")
    text = "When a probe last saw the training thread do anything, in unix time."
    progress = _gauge("last_progress_timestamp_seconds", text)
    for rank in ranks:
        snapshot = rank.snapshot
        for phase, value in snapshot.phase_seconds.items():
            seconds.add_metric([*rank.key, phase], value)
        progress.add_metric(rank.key, snapshot.unix(snapshot.last_progress))
        if snapshot.alive:
            since.add_metric([*rank.key, snapshot.phase], snapshot.unix(snapshot["phase_since"]))
    return seconds, since, progress


def _collectives(ranks: Sequence[Rank]) -> Iterable[Metric]:
    count = _counter("collectives", "Collectives that the rank took part in, by operation.", "op")
    seconds = _counter("collective_seconds", "Time that the training thread spent in collectives.", "op")
    size = _counter("collective_bytes", "Payload that the rank handed to collectives.", "op")
    for rank in ranks:
        snapshot = rank.snapshot
        fields = (snapshot.many(f) for f in ("collectives", "collective_seconds", "collective_bytes"))
        for op, calls, spent, handed in zip(record.OPS, *fields, strict=True):
            if calls:
                count.add_metric([*rank.key, op], calls)
                seconds.add_metric([*rank.key, op], spent)
            if handed:  # absent where it is not known (DDP under a communication hook) or there is none (a barrier)
                size.add_metric([*rank.key, op], handed)
    return count, seconds, size
