"""Publishing the rank record of this process: the time, the place, and the content of its info."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from rankscope.guard import logger
from rankscope.process import identity
from rankscope.process.environment import labels, number
from rankscope.record import layout
from rankscope.record.clock import MACHINE, boot_id, own_clocks
from rankscope.record.directory import opened, weakness
from rankscope.record.free_rank import free_rank
from rankscope.record.old_records import claimants, parent_rank, remove_old_records
from rankscope.record.process_stat import own_start
from rankscope.record.text import NUMBER, replace_unprintable
from rankscope.record.writer import RankWriter, encode_info, run_directory
from rankscope.timeline.timeline import Timeline

ERROR_LIMIT = 200  # characters of a path or an error

# Events that show that a process without a process group is training. Fetching data is not one: a distributed script
# may read data before it knows its rank.
TRAINING_EVENTS = frozenset({layout.FORWARD, layout.BACKWARD, layout.OPTIMIZER})

# Events that show that a process started by a rank is training itself: it may evaluate the model for that rank.
UPDATE_EVENTS = TRAINING_EVENTS - {layout.FORWARD}

STEPS_WITHOUT_GROUP = 20  # longer than a warm-up before init_process_group
OMITTABLE: dict[str, Any] = {
    "settings": {},
    "group_descriptions": [],
    "tracker_urls": {},
    "tracker_ids": {},
    "labels": {},
    "slurm": {},
    "rendezvous": "",
}
"""Entries that are omitted from an info that is too large, in this order, until it fits."""
RANK_IDENTITY = ("rank", "world_size", "group")  # if one of these changes, the process is another rank


class Publication:
    """Publishes one record. `details` returns the entries of its info besides the rank's identity."""

    def __init__(self, writer: RankWriter, details: Callable[[], dict[str, Any]]) -> None:
        self._writer = writer
        self._details = details
        self._was_removed = False
        self.restart()

    def restart(self) -> None:
        """Start over in a forked child, which is not a rank until it trains."""
        self._identity: dict[str, Any] = {}
        self._labels: dict[str, str] = {}  # the user's own
        self._run = ""  # the run of which this process was a rank before
        self._parent: dict[str, Any] = {}  # info of the rank that started this process; empty: none known yet
        self._inherits_rank: bool | None = None  # None: not read yet

    @property
    def has_identity(self) -> bool:
        """True if this process is known to be a rank."""
        return bool(self._identity)

    def leave_rank(self) -> None:
        """Start over as another rank of the same run."""
        self._identity, self._run = {}, self._identity["run"]

    def is_same_rank(self) -> bool:
        """Return whether this process is still the same rank. Also updates its backend and GPU."""
        now = identity.describe(self._identity["run"])
        if now["world_size"] == self._identity["world_size"] == "1":
            now |= {label: self._identity[label] for label in RANK_IDENTITY}  # its number does not change
        if any(now[label] != self._identity[label] for label in RANK_IDENTITY):
            return False
        self._identity = {**now, "run": self._identity["run"]}
        return True

    def is_training(self, timeline: Timeline, event: int) -> bool:
        """Return whether this event shows that this process trains and is not a helper of a rank."""
        if is_loader_worker():
            return False
        if identity.is_distributed():  # a rank may start a process with a group of its own to save or to generate
            if event in UPDATE_EVENTS:
                return True
            return (identity.has_peers() or trains_alone(timeline, event)) and not self._was_started_by_rank()
        return trains_alone(timeline, event) and not self._is_helper(event)

    def _is_helper(self, event: int) -> bool:
        """Return whether a rank started this process to evaluate, or this process only inherits its rank number."""
        if event not in UPDATE_EVENTS:
            return self._was_started_by_rank()
        parent = self._read_parent()
        return bool(parent) and (identity.has_launcher() or bool(parent.get("backend")))

    def _was_started_by_rank(self) -> bool:
        """Return whether a rank started this process, even if that rank has no record yet."""
        if self._inherits_rank is None:
            self._inherits_rank = identity.inherits_rank()
        return self._inherits_rank or bool(self._read_parent())

    def _read_parent(self) -> dict[str, Any]:
        """Return the info of the rank that started this process; empty if none did, or if it has no record yet."""
        if not self._parent:
            with contextlib.suppress(OSError):
                directory = run_directory()
                with opened(directory) as descriptor:
                    self._parent = parent_rank(directory, descriptor)
        return self._parent

    def publish(self) -> bool:
        """Publish the record. If that fails, log the reason and return False: training continues without it."""
        self._identity = identity.describe(self._run or self._read_parent().get("run", ""))
        self._labels = labels("RANKSCOPE_LABELS")
        try:
            self._publish()
        except OSError as error:
            _log_failure("cannot record this rank", error)
            return False
        return True

    def publish_again(self) -> None:
        """Publish the record, whose file was removed, with all its counts. If that fails, log it and count on."""
        try:
            self._writer.publish(run_directory(), identity.file_name(self._identity), self.info())
        except OSError as error:
            self._writer.detach()
            _log_failure("this rank's record was removed, cannot record it again", error)
            return
        if not self._was_removed:
            path = replace_unprintable(str(self._writer.path), ERROR_LIMIT)
            logger.warning("rankscope: this rank's record was removed; recorded again: %s", path)
        self._was_removed = True

    def _publish(self) -> None:
        directory = run_directory()
        with opened(directory) as descriptor:
            if (problem := weakness(descriptor)) and self._identity["local_rank"] == "0":  # once per node
                path = replace_unprintable(str(directory), ERROR_LIMIT)
                logger.warning("rankscope: the run directory %s %s", path, problem)
            if identity.has_peers():
                if not self._run:  # ranks that change their numbers have each other's for a moment
                    _warn_of_claimant(directory, descriptor, self._identity)
                self._make_record(directory, descriptor)
                return
            run = self._identity["run"]
            with free_rank(directory, descriptor, run, identity.file_prefix(run), self._numbers()) as rank:
                self._identity |= {"rank": str(rank), "group": str(rank)}
                self._make_record(directory, descriptor)

    def _numbers(self) -> Iterator[int]:
        """Return the numbers that this process may have if it trains alone: its launcher's, or one beyond the ranks."""
        if self._parent:
            ranks = str(self._parent.get("world_size"))
            return count(int(ranks) if NUMBER.fullmatch(ranks) else 1)
        return chain([int(self._identity["rank"])], count(identity.launched_ranks()))

    def _make_record(self, directory: Path, descriptor: int) -> None:
        remove_old_records(directory, descriptor, self._identity)
        self._writer.publish(directory, identity.file_name(self._identity), self.info())

    def refresh(self) -> None:
        """Rewrite the info, if the rank's identity is known."""
        if self._identity:
            self._writer.write_info(self.info())

    def info(self) -> dict[str, Any]:
        """Return the record's current info, without entries that do not fit."""
        process: dict[str, Any] = {"process_start": own_start(), "boot_id": boot_id()}
        if (clocks := own_clocks()) != MACHINE:
            process["clocks"] = clocks
        own: dict[str, Any] = {"labels": self._labels} if self._labels else {}
        if rendezvous := identity.rendezvous():
            own["rendezvous"] = rendezvous
        info = {**self._identity, **own, "slurm": identity.slurm_job(), **process, **self._details()}
        for name, empty in OMITTABLE.items():
            if len(encode_info(info)) <= layout.INFO_CAPACITY:
                break
            info[name] = empty
        return info


def _warn_of_claimant(directory: Path, descriptor: int, own: dict[str, Any]) -> None:
    """Warn if a living process is already the same rank of the run: the exporter shows one of them, or two runs."""
    prefix = f"{identity.file_prefix(own['run'])}{own['rank']}."
    for other in claimants(directory, descriptor, own, prefix):
        place = replace_unprintable(f"pid {other.get('pid')} on {other.get('node')}", ERROR_LIMIT)
        logger.warning(
            "rankscope: another process is already rank %s of run %s: %s; the exporter shows one of the "
            "two jobs as run `%s (2)`, or hides one of the two ranks. Set RANKSCOPE_RUN to another name for each job",
            *(own["rank"], own["run"], place, own["run"]),
        )


def _log_failure(problem: str, error: OSError) -> None:
    named = "RANKSCOPE_RUN_DIR: " if os.environ.get("RANKSCOPE_RUN_DIR") else ""
    reason = replace_unprintable(str(error), ERROR_LIMIT)
    logger.warning("rankscope: %s; training continues: %s%s", problem, named, reason)


def trains_alone(timeline: Timeline, event: int) -> bool:
    """Return whether this is training without a process group, not evaluation or a warm-up before torchrun's group."""
    from torch import is_grad_enabled

    if event not in TRAINING_EVENTS or (event == layout.FORWARD and not is_grad_enabled()):
        return False
    expects_group = int(number("WORLD_SIZE", default="1")) > 1
    return not expects_group or timeline.steps.count >= STEPS_WITHOUT_GROUP


def is_loader_worker() -> bool:
    """Return whether a DataLoader has started this process."""
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
