"""What every rank on this machine does: from the records in the run directories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import Metric

from rankscope import record
from rankscope_exporter.families import HistogramMetricFamily
from rankscope_exporter.metric import Declaration
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


def _gauge(name: str, text: str, *labels: str) -> Declaration:
    return Declaration("gauge", f"rankscope_rank_{name}", text, (*RANK, *labels))


def _counter(name: str, text: str, *labels: str) -> Declaration:
    return Declaration("counter", f"rankscope_rank_{name}_total", text, (*RANK, *labels))


INFO = _gauge("info", "What the rank is and where it runs; `uuid` is that of its GPU.", *LABELS[2:])
UP = _gauge("up", "1 while the rank's process lives.")
START = _gauge("start_timestamp_seconds", "When the rank's record began, in unix time.")
EXIT_INFO = _gauge(
    "exit_info",
    "Only after the end: how the rank ended: `finished` (left Python in order, whatever its exit code), `exception`, "
    "`interrupted` (Ctrl-C), `sigterm` or `killed` (without a word).",
    "reason",
)
EXIT = _gauge(
    "exit_timestamp_seconds",
    "When the rank ended, in unix time: by its own clock, and for a killed one when the exporter noticed.",
)
STEPS = _counter("steps", "Training steps that the rank has finished: optimizer steps, or calls of `rankscope.step()`.")
STEP_SECONDS = Declaration(
    "histogram",
    "rankscope_rank_step_seconds",
    "Time from the end of one training step to the end of the next.",
    RANK,
)
PHASE_SECONDS = _counter(
    "phase_seconds",
    "The training thread's time by phase; the phases partition it: `startup`, `data_wait`, `forward`, `backward`, "
    "`collective_wait`, `optimizer`, `checkpoint`, `evaluation`, `other`, and the user's own.",
    "phase",
)
PHASE_SINCE = _gauge(
    "phase_since_timestamp_seconds", "The phase that the rank is in, and since when in unix time.", "phase"
)
PROGRESS = _gauge(
    "last_progress_timestamp_seconds", "When a probe last saw the training thread do anything, in unix time."
)
COLLECTIVES = _counter(
    "collectives",
    "Collectives that the rank took part in; `ddp_all_reduce` is DDP's gradient averaging, once a backward pass.",
    "op",
)
COLLECTIVE_SECONDS = _counter(
    "collective_seconds", "Time that the training thread spent in collectives: exposed, not overlapped.", "op"
)
COLLECTIVE_BYTES = _counter("collective_bytes", "Payload that the rank handed to collectives.", "op")
DISABLED = _gauge("probes_disabled", "Probes switched off in the rank after an error of their own.")
METRICS = (
    *(INFO, UP, START, EXIT_INFO, EXIT, STEPS, STEP_SECONDS, PHASE_SECONDS, PHASE_SINCE, PROGRESS),
    *(COLLECTIVES, COLLECTIVE_SECONDS, COLLECTIVE_BYTES, DISABLED),
)
SKIPPED = Declaration(
    "gauge",
    "rankscope_exporter_rank_files_skipped",
    "Files in the run directories that are not shown as a rank now. No readable record: `truncated`, `foreign`, "
    "`version`, `symlink`, `unreadable` (also a run directory that is one of the last two). Readable, but the record "
    "of another user for the same run and rank is shown: `duplicate`. Limits: `too_many_files` (more than 1,024 in "
    "all, or names after the first 8,192 of a directory, which count as 1), `too_many_ranks` (more than 256).",
    ("reason",),
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
        skipped = SKIPPED.family()
        for reason in SKIP_REASONS:
            skipped.add_metric([reason], scan.skipped[reason])
        yield skipped


def _life(ranks: Sequence[Rank]) -> Iterable[Metric]:
    info, up, start, disabled = INFO.family(), UP.family(), START.family(), DISABLED.family()
    exit_info, exit_time = EXIT_INFO.family(), EXIT.family()
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
    steps = STEPS.family()
    histogram = HistogramMetricFamily(STEP_SECONDS.name, STEP_SECONDS.help, labels=STEP_SECONDS.labels)
    bounds = [*map(str, record.STEP_BOUNDS), "+Inf"]
    for rank in ranks:
        steps.add_metric(rank.key, rank.snapshot["steps"])
        cumulated = accumulate(rank.snapshot.many("step_buckets"))
        buckets = list(zip(bounds, cumulated, strict=True))
        histogram.add_metric(rank.key, buckets, rank.snapshot["step_seconds"])
    return steps, histogram


def _phases(ranks: Sequence[Rank]) -> Iterable[Metric]:
    seconds, since, progress = PHASE_SECONDS.family(), PHASE_SINCE.family(), PROGRESS.family()
    for rank in ranks:
        snapshot = rank.snapshot
        for phase, value in snapshot.phase_seconds.items():
            seconds.add_metric([*rank.key, phase], value)
        progress.add_metric(rank.key, snapshot.unix(snapshot.last_progress))
        if snapshot.alive:
            since.add_metric([*rank.key, snapshot.phase], snapshot.unix(snapshot["phase_since"]))
    return seconds, since, progress


def _collectives(ranks: Sequence[Rank]) -> Iterable[Metric]:
    count, seconds, size = COLLECTIVES.family(), COLLECTIVE_SECONDS.family(), COLLECTIVE_BYTES.family()
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
