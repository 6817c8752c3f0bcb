"""What every rank on this machine does: from the records in the run directories."""

from __future__ import annotations

from prometheus_client.core import Metric

from rankscope_exporter.lines import Lines, families
from rankscope_exporter.metric import Declaration
from rankscope_exporter.rank_metrics import collectives, life, process, steps
from rankscope_exporter.run_directory import Key, Rank, Scan

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

METRICS = (*life.METRICS, *steps.METRICS, *collectives.METRICS, *process.METRICS)
SKIPPED = Declaration(
    "gauge",
    "rankscope_exporter_rank_files_skipped",
    "Files in the run directories that are not shown as a rank now. No readable record: `truncated`, `foreign`, "
    "`version`, `symlink`, `unreadable` (also a run directory that is one of the last two). Readable, but another "
    "living record of the same run, rank and owner is shown: `duplicate`. Limits: `too_many_files` (more than 1,024 in "
    "all, or names after the first 8,192 of a directory, which count as 1), `too_many_ranks` (more than 256).",
    ("reason",),
)


class Ranks:
    """Writes what the records say."""

    name = "ranks"
    help = "training ranks: phases, steps, collectives, life and death"

    def __init__(self) -> None:
        self._lines: dict[Key, Lines[Rank]] = {}

    def look(self, scan: Scan) -> list[Metric]:
        """Every rank's metrics, and how many files were no records."""
        self._lines = {rank.key: self._lines.get(rank.key) or Lines(METRICS, rank.key) for rank in scan.ranks}
        texts = [self._lines[rank.key].write(rank) for rank in scan.ranks]
        skipped = SKIPPED.family({reason: scan.skipped[reason] for reason in SKIP_REASONS})
        return [*families(METRICS, texts), skipped]
