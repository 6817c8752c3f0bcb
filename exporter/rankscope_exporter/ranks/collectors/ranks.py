"""The metrics of all ranks on this machine, from the records in the run directories."""

from __future__ import annotations

import argparse
import pwd
from dataclasses import dataclass

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Declaration, MetricTable, whole
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.flags import flag
from rankscope_exporter.ranks.metrics import collectives, life, process, steps
from rankscope_exporter.ranks.rank import Key, Rank, Scan
from rankscope_exporter.ranks.share import OWNER_RANKS_LIMIT, RANKS_LIMIT

SKIP_REASONS = {
    "truncated": "truncated",
    "foreign": "no rank record",
    "version": "another version of Rankscope",
    "symlink": "symbolic link",
    "unreadable": "unreadable",
    "duplicate": "duplicate rank",
    "unnamed": "no run name",
    "impossible_rank": "rank outside the world size",
    "future_start": "start time in the future",
    "too_many_files": "over the limit of files",
    "too_many_ranks": "over the limit of ranks",
    "too_many_names": "over the limit of new names",
}
"""In words for the status page, by the label of the metric."""

METRICS = (*life.METRICS, *steps.METRICS, *collectives.METRICS, *process.METRICS)
SCAN = MetricTable[Scan, Scan]("rankscope_exporter_", (), whole)
SKIPPED = SCAN.gauge(
    "rank_files_skipped",
    "Files in the run directories that are not shown as a rank. Not a readable record: `truncated`, `foreign`, "
    "`version`, `symlink`, `unreadable` (the last two also for a run directory). Another living record of the same "
    "run, rank and owner is shown: `duplicate`. Impossible values: `unnamed` (the run has no name), `impossible_rank` "
    "(the rank is not below the world size), `future_start` (more than a minute in the future). Limits: "
    "`too_many_files` (more than 1,024, or 256 of one owner; the files that a scan has not reached count as 1 for each "
    f"directory), `too_many_ranks` (more than {RANKS_LIMIT}, or {OWNER_RANKS_LIMIT} of one owner; a rank that may take "
    "more than 32 KiB on the page counts as several), `too_many_names` (new names of the owner's runs, ranks, "
    "groups, phases and so on may create more than 100,000 new series at once, or 300,000 per hour).",
    lambda scan: {reason: scan.skipped[reason] for reason in SKIP_REASONS},
    "reason",
)
CONTRADICTED = SCAN.gauge(
    "rank_gpus_contradicted",
    "Ranks whose record names a GPU that this node does not have, or that only other users' processes use: their "
    "`uuid` is empty. Processes count only if they are visible and the collector `allocation` is on.",
    lambda scan: sum(rank.is_elsewhere for rank in scan.ranks),
)
SCAN_METRICS = (SKIPPED, CONTRADICTED)
ALIVE = Declaration(
    "gauge", "rankscope_exporter_ranks_alive", "Living ranks that the exporter shows, on its node.", ("node",)
)


def _users(text: str) -> frozenset[int]:
    """Return the uids of a comma-separated list of names and uids. Raise ArgumentTypeError."""
    return frozenset(map(_uid, text.split(",")))


def _uid(user: str) -> int:
    if user.isdecimal() and len(user) <= 10:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):  # ValueError if it cannot be a name
        raise argparse.ArgumentTypeError(f"{user!r} is not a user of this machine or a uid") from None


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """The settings of the collector."""

    ranks_owner: str = flag(
        "--collector.ranks.owner",
        choices=("uid", "none"),
        default="uid",
        help="label `owner` of ranks: `uid` is the owner of the record's file and separates runs with the same name "
        "of different users. Use `none` on all nodes if each pod of a run has its own user namespace; then any user "
        "who can write records can write one for any run (default: %(default)s)",
    )
    users: frozenset[int] | None = flag(
        "--collector.ranks.users",
        type=_users,
        metavar="USER,…",
        help="show only ranks of these users (names or uids), and read no other records (default: all users)",
    )

    @property
    def has_owner(self) -> bool:
        """Return whether a run is identified by its name and owner, not by its name alone."""
        return self.ranks_owner == "uid"


class Ranks:
    """The collector of records."""

    name = "ranks"
    help = "training ranks: phases, steps, collectives, start and end"
    metrics = METRICS

    def __init__(self, node: str = "") -> None:
        self._node = node
        self._caches: dict[Key, SampleCache[Rank]] = {}
        self._of_scan = SampleCache(SCAN_METRICS)

    def poll(self, scan: Scan) -> list[Metric]:
        """Return the metrics of all ranks, and the number of skipped files."""
        self._caches = {rank.key: self._caches.get(rank.key) or SampleCache(METRICS, rank.key) for rank in scan.ranks}
        texts = [self._caches[rank.key].write(rank) for rank in scan.ranks]
        alive = ALIVE.family({(self._node,): float(sum(rank.snapshot.alive for rank in scan.ranks))})
        return [*families(METRICS, texts), *families(SCAN_METRICS, [self._of_scan.write(scan)]), alive]
