"""Who lays claim to GPUs: the living ranks as they were read last, and schedulers, asked again and again in a thread of
their own, because a kubelet or a directory service that does not answer must hold up neither a scrape nor the sampling
of a device.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.processes import UserNames
from rankscope_exporter.ranks.rank import Rank, Scan
from rankscope_exporter.worker import Worker

INTERVAL = 5.0  # seconds: a third of the usual scrape interval; the kubelet lists all its pods each time
STALE_AFTER = 3  # intervals

Answer = Mapping[str, Sequence[Holder]]

logger = logging.getLogger(__name__)


class SchedulerError(Exception):
    """A scheduler cannot be asked, or has not answered so that it can be read."""


class Scheduler(Protocol):
    """Gives GPUs to somebody."""

    name: str

    def holders(self) -> Answer:
        """Who has each GPU now, by index, UUID or device file. May raise: then it is not known."""


@dataclass(frozen=True)
class Claims:
    """Who lays claim to which GPU."""

    holders: Answer = field(default_factory=dict)
    """What the schedulers say, by index, UUID or device file."""
    is_complete: bool = False
    """Whether every scheduler has answered and the ranks are known; if not, a GPU that is not named may be somebody's
    all the same."""
    ranks: Mapping[str, Sequence[Rank]] = field(default_factory=dict)
    """Living ranks by the UUID of their GPU."""

    def on(self, index: int, file: str, *uuids: str) -> list[Holder]:
        """Return the schedulers' holders and the ranks of one GPU.

        It is known by its index, its device file (`nvidia0`), its UUID and those of its MIG instances.
        """
        names = (str(index), file, *uuids)
        return [
            *(holder for name in names for holder in self.holders.get(name, ())),
            *(_holder(rank) for rank in self.ranks_on(*uuids)),
        ]

    def ranks_on(self, *uuids: str) -> list[Rank]:
        """Return the living ranks of one GPU."""
        return [rank for uuid in uuids for rank in self.ranks.get(uuid, ())]


class ClaimsWatcher(Worker):
    """Keeps what the schedulers said a few seconds ago. `users` get their names here too, as that may take as long.

    `ranks` are those of the last second, None if they are not known: a rank's claim must not outlive its process, or
    each GPU of a job that ends would count as allocated for some seconds more.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        ranks: Callable[[], Scan | None],
        users: UserNames,
        interval: float = INTERVAL,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("claims", interval, self.poll, "the claims to GPUs cannot be collected")
        self._schedulers = schedulers
        self._ranks = ranks
        self._users = users
        self._monotonic = monotonic
        self._answers: tuple[float, Sequence[Answer | None]] | None = None
        self._complaints: dict[str, str] = {}

    def claims(self) -> Claims:
        """Now. Without the schedulers, and not complete, if they were asked too long ago."""
        scan = self._ranks()
        ranks = _living(scan) if scan else {}
        if self._answers is None or self._monotonic() - self._answers[0] > STALE_AFTER * self._interval:
            return Claims(ranks=ranks)
        answers = self._answers[1]
        return Claims(_by_gpu(answers), None not in answers and scan is not None, ranks)

    def poll(self) -> None:
        """Ask every scheduler once."""
        began = self._monotonic()
        self._answers = began, [self._ask(scheduler) for scheduler in self._schedulers]
        self._users.resolve()

    def _ask(self, scheduler: Scheduler) -> Answer | None:
        """None if it does not answer, which is logged when it begins."""
        try:
            answer = scheduler.holders()
        except Exception as error:
            if self._complaints.get(scheduler.name) != str(error):
                logger.warning("%s does not say who holds the GPUs: %s", scheduler.name, error)
                self._complaints[scheduler.name] = str(error)
            return None
        if self._complaints.pop(scheduler.name, None):
            logger.info("%s says again who holds the GPUs", scheduler.name)
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
