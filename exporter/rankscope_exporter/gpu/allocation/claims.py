"""Claims to GPUs: living ranks from the last read, and schedulers' answers.

A thread polls the schedulers, because a kubelet that does not respond must not delay scrapes or device
sampling.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.ranks.rank import Rank, Scan
from rankscope_exporter.worker import Worker

INTERVAL = 5.0  # seconds: a third of the usual scrape interval; the kubelet lists all its pods in each response
STALE_AFTER = 3  # intervals

Answer = Mapping[str, Sequence[Holder]]

logger = logging.getLogger(__name__)


class SchedulerError(Exception):
    """A scheduler query failed, or its answer cannot be parsed."""


class Scheduler(Protocol):
    """A system that allocates GPUs."""

    name: str

    def holders(self) -> Answer:
        """Return the current holders by index, UUID or device file. If it raises, they are unknown."""


@dataclass(frozen=True)
class Claims:
    """The claims to each GPU."""

    holders: Answer = field(default_factory=dict)
    """The schedulers' answers, by index, UUID or device file."""
    is_complete: bool = False
    """True if every scheduler answered and the ranks are known. Otherwise a GPU without a claim may be allocated."""
    ranks: Mapping[str, Sequence[Rank]] = field(default_factory=dict)
    """Living ranks by the UUID of their GPU."""

    def find_holders(self, index: int, file: str, *uuids: str) -> list[Holder]:
        """Return the holders of one GPU according to schedulers and ranks.

        Match its index, its device file (`nvidia0`), its UUID and the UUIDs of its MIG instances.
        """
        names = (str(index), file, *uuids)
        return [
            *(holder for name in names for holder in self.holders.get(name, ())),
            *(_holder(rank) for rank in self.find_ranks(*uuids)),
        ]

    def find_ranks(self, *uuids: str) -> list[Rank]:
        """Return the living ranks of one GPU."""
        return [rank for uuid in uuids for rank in self.ranks.get(uuid, ())]


class ClaimsWatcher(Worker):
    """A thread that polls the schedulers every few seconds.

    `ranks` returns the ranks of the last second, or None if they are unknown. They are not cached here: a rank's claim
    must end with its process, or each GPU of a job that ends would count as allocated for some seconds more.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        ranks: Callable[[], Scan | None],
        interval: float = INTERVAL,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("claims", interval, self.poll, "querying GPU holders failed")
        self._schedulers = schedulers
        self._ranks = ranks
        self._monotonic = monotonic
        self._answers: tuple[float, Sequence[Answer | None]] | None = None
        self._logged_errors: dict[str, str] = {}

    def claims(self) -> Claims:
        """Return the current claims. If the schedulers' answers are stale, omit them and set `is_complete` to False."""
        scan = self._ranks()
        ranks = _living(scan) if scan else {}
        if self._answers is None or self._monotonic() - self._answers[0] > STALE_AFTER * self._interval:
            return Claims(ranks=ranks)
        answers = self._answers[1]
        return Claims(_by_gpu(answers), None not in answers and scan is not None, ranks)

    def poll(self) -> None:
        """Query every scheduler once."""
        began = self._monotonic()
        self._answers = began, [self._query(scheduler) for scheduler in self._schedulers]

    def _query(self, scheduler: Scheduler) -> Answer | None:
        """Return the scheduler's answer, or None if the query fails. Logs only when an error begins or changes."""
        try:
            answer = scheduler.holders()
        except Exception as error:
            if self._logged_errors.get(scheduler.name) != str(error):
                logger.warning("%s query for GPU holders failed: %s", scheduler.name, error)
                self._logged_errors[scheduler.name] = str(error)
            return None
        if self._logged_errors.pop(scheduler.name, None):
            logger.info("%s query for GPU holders recovered", scheduler.name)
        return answer


def _by_gpu(answers: Sequence[Answer | None]) -> Answer:
    holders: dict[str, list[Holder]] = defaultdict(list)
    for answer in answers:
        for gpu, named in (answer or {}).items():
            holders[gpu] += named
    return dict(holders)


def _holder(rank: Rank) -> Holder:
    run, number, owner = rank.key
    job = rank.snapshot.info.get("slurm", {})
    return Holder(
        "rank",
        slurm_job_id=job.get("job_id", ""),
        slurm_job_name=job.get("job_name", ""),
        run=run,
        rank=number,
        owner=owner,
        uid=str(rank.owner),
        sluid=job.get("sluid", ""),
    )


def _living(scan: Scan) -> Mapping[str, Sequence[Rank]]:
    ranks: dict[str, list[Rank]] = defaultdict(list)
    for rank in scan.ranks:
        if rank.snapshot.alive and rank.uuid:
            ranks[rank.uuid].append(rank)
    return dict(ranks)
