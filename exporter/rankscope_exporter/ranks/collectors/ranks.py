"""What every rank on this machine does: from the records in the run directories."""

from __future__ import annotations

import argparse
import pwd
from dataclasses import dataclass

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import MetricTable, whole
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.flags import flag
from rankscope_exporter.ranks.metrics import collectives, life, process, steps
from rankscope_exporter.ranks.rank import Key, Rank, Scan

SKIP_REASONS = (
    "truncated",
    "foreign",
    "version",
    "symlink",
    "unreadable",
    "duplicate",
    "unnamed",
    "impossible_rank",
    "future_start",
    "too_many_files",
    "too_many_ranks",
    "too_many_names",
)

METRICS = (*life.METRICS, *steps.METRICS, *collectives.METRICS, *process.METRICS)
SCAN = MetricTable[Scan, Scan]("rankscope_exporter_", (), whole)
SKIPPED = SCAN.gauge(
    "rank_files_skipped",
    "Files in the run directories that are not shown as a rank now. No readable record: `truncated`, `foreign`, "
    "`version`, `symlink`, `unreadable` (also a run directory that is one of the last two). Readable, but another "
    "living record of the same run, rank and owner is shown: `duplicate`. Readable, but it cannot be true: "
    "`unnamed` (its run has no name), `impossible_rank` (a number that is not below the world size), "
    "`future_start` (in more than a minute). "
    "Limits: `too_many_files` (more than 1,024 in all or 256 of one owner; names of a directory that the scan did "
    "not get to count as 1), `too_many_ranks` (more than 256, or 128 of one owner; one that may take more than "
    "32 KiB on the page counts as several), `too_many_names` (the owner's ranks have new names, of runs, ranks, "
    "groups, phases and so on, that may be more than 100,000 new series at once, or 300,000 an hour).",
    lambda scan: {reason: scan.skipped[reason] for reason in SKIP_REASONS},
    "reason",
)
CONTRADICTED = SCAN.gauge(
    "rank_gpus_contradicted",
    "Ranks whose record names a GPU that this node does not have, or on which only other users' processes are: their "
    "`uuid` is empty. Processes count only where they can be looked up, and with the collector `allocation`.",
    lambda scan: sum(rank.is_elsewhere for rank in scan.ranks),
)
SCAN_METRICS = (SKIPPED, CONTRADICTED)


def _users(text: str) -> frozenset[int]:
    """Return the uids of a list of names and uids. Raises ArgumentTypeError."""
    return frozenset(map(_uid, text.split(",")))


def _uid(user: str) -> int:
    if user.isdecimal() and len(user) <= 10:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):  # the latter of what cannot be a name
        raise argparse.ArgumentTypeError(f"{user!r} is no user of this machine, and no uid") from None


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """Which ranks are shown, and by which labels."""

    ranks_owner: str = flag(
        "--collector.ranks.owner",
        choices=("uid", "none"),
        default="uid",
        help="the label `owner` of ranks: the uid of their records' files, by which two users' runs of one name are "
        "told apart; `none`, alike on all nodes, where each pod of a run has a user namespace and uids of its own: "
        "then whoever may write records can write one about any run (default: %(default)s)",
    )
    users: frozenset[int] | None = flag(
        "--collector.ranks.users",
        type=_users,
        metavar="USER,…",
        help="whose ranks are shown, by names or uids; records of others are not read (default: everybody's)",
    )

    @property
    def has_owner(self) -> bool:
        """Whether a run's identity is its name and its owner's uid, or its name alone."""
        return self.ranks_owner == "uid"


class Ranks:
    """Writes what the records say."""

    name = "ranks"
    help = "training ranks: phases, steps, collectives, life and death"
    metrics = METRICS

    def __init__(self) -> None:
        self._caches: dict[Key, SampleCache[Rank]] = {}
        self._of_scan = SampleCache(SCAN_METRICS)

    def poll(self, scan: Scan) -> list[Metric]:
        """Every rank's metrics, and how many files were no records."""
        self._caches = {rank.key: self._caches.get(rank.key) or SampleCache(METRICS, rank.key) for rank in scan.ranks}
        texts = [self._caches[rank.key].write(rank) for rank in scan.ranks]
        return [*families(METRICS, texts), *families(SCAN_METRICS, [self._of_scan.write(scan)])]
