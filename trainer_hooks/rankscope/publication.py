"""When and where this process publishes its rank record, and what the record's info says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope.guard import logger
from rankscope.process import identity
from rankscope.process.environment import labels, number
from rankscope.record import layout
from rankscope.record.clock import boot_id
from rankscope.record.directory import opened, weakness
from rankscope.record.free_rank import free_rank
from rankscope.record.old_records import parent_rank, remove_old_records
from rankscope.record.process_stat import own_start
from rankscope.record.text import replace_unprintable
from rankscope.record.writer import RankWriter, encode_info, run_directory
from rankscope.timeline.timeline import Timeline

ERROR_LIMIT = 200  # characters of a path or an error: a path may have thousands

# Events after which a process without a process group is surely training. Fetching data is none of them: a
# distributed script may look at its data before it knows its rank.
TRAINING_EVENTS = frozenset({layout.FORWARD, layout.BACKWARD, layout.OPTIMIZER})

# After these a process that a rank has started trains, too: it may evaluate the model for that rank.
UPDATE_EVENTS = TRAINING_EVENTS - {layout.FORWARD}

STEPS_WITHOUT_GROUP = 20  # a warm-up before init_process_group is shorter
LEFT_OUT: dict[str, Any] = {
    "settings": {},
    "group_descriptions": [],
    "tracker_urls": {},
    "tracker_ids": {},
    "labels": {},
    "slurm": {},
}
"""What is left out of an info that is too large, in this order, until it fits."""
WHO = ("rank", "world_size", "group")  # a process of which one of these changes is another rank


class Publication:
    """Publishes one record. `details` returns what its info has in addition to the rank's identity."""

    def __init__(self, writer: RankWriter, details: Callable[[], dict[str, Any]]) -> None:
        self._writer = writer
        self._details = details
        self.restart()

    def restart(self) -> None:
        """Begin again as a forked child, which is no rank before it trains itself."""
        self._identity: dict[str, Any] = {}
        self._labels: dict[str, str] = {}  # the user's own
        self._run = ""  # the name of the run that this process was a rank of before
        self._parent: dict[str, Any] | None = None  # the info of the rank that has started this process, once read

    @property
    def has_identity(self) -> bool:
        """Whether this process is known to be a rank."""
        return bool(self._identity)

    def leave_rank(self) -> None:
        """Begin again as another rank of the same run."""
        self._identity, self._run = {}, self._identity["run"]

    def is_same_rank(self) -> bool:
        """Whether this process still is the rank that it was; the names of its backend and GPU are read again."""
        now = identity.describe(self._identity["run"])
        if any(now[label] != self._identity[label] for label in WHO):
            return False
        self._identity = {**now, "run": self._identity["run"]}
        return True

    def is_training(self, timeline: Timeline, event: int) -> bool:
        """Whether this event shows that this process trains, and is no helper of a rank."""
        if is_loader_worker():
            return False
        return identity.is_distributed() or (trains_alone(timeline, event) and not self._is_helper(event))

    def _is_helper(self, event: int) -> bool:
        """Whether a rank has started this process to evaluate, or has a number that this process only inherits."""
        parent = self._read_parent()
        return bool(parent) and (event not in UPDATE_EVENTS or identity.has_launcher() or bool(parent.get("backend")))

    def _read_parent(self) -> dict[str, Any]:
        """Return the info of the rank that has started this process; empty if none has."""
        if self._parent is None:
            self._parent = {}
            with contextlib.suppress(OSError):
                directory = run_directory()
                with opened(directory) as descriptor:
                    self._parent = parent_rank(directory, descriptor)
        return self._parent

    def publish(self) -> bool:
        """Publish the record. If that fails, log why and return False: training goes on without it."""
        self._identity = identity.describe(self._run or self._read_parent().get("run", ""))
        self._labels = labels("RANKSCOPE_LABELS")
        try:
            self._publish()
        except OSError as error:
            named = "RANKSCOPE_RUN_DIR: " if os.environ.get("RANKSCOPE_RUN_DIR") else ""
            reason = replace_unprintable(str(error), ERROR_LIMIT)
            logger.warning("rankscope: no record of this rank, training goes on: %s%s", named, reason)
            return False
        return True

    def _publish(self) -> None:
        directory = run_directory()
        with opened(directory) as descriptor:
            if (why := weakness(descriptor)) and self._identity["local_rank"] == "0":  # once a node is enough
                path = replace_unprintable(str(directory), ERROR_LIMIT)
                logger.warning("rankscope: the run directory %s %s", path, why)
            if identity.is_distributed() or identity.has_launcher():
                self._make_record(directory, descriptor)
                return
            run = self._identity["run"]
            with free_rank(directory, descriptor, run, identity.file_prefix(run)) as rank:
                if rank:  # next to rank 0, in a world of unknown size
                    self._identity |= {"rank": str(rank), "world_size": "", "group": str(rank)}
                self._make_record(directory, descriptor)

    def _make_record(self, directory: Path, descriptor: int) -> None:
        remove_old_records(directory, descriptor, self._identity)
        self._writer.publish(directory, identity.file_name(self._identity), self.info())

    def refresh(self) -> None:
        """Write the info again, once the rank's identity is known."""
        if self._identity:
            self._writer.write_info(self.info())

    def info(self) -> dict[str, Any]:
        """Return the record's info as of now, without what is left out where it does not fit."""
        parent = {"parent": self._parent["pid"]} if self._parent else {}
        process = {"process_start": own_start(), "boot_id": boot_id()}
        own = {"labels": self._labels} if self._labels else {}
        info = {**self._identity, **own, "slurm": identity.slurm_job(), **parent, **process, **self._details()}
        for name, empty in LEFT_OUT.items():
            if len(encode_info(info)) <= layout.INFO_CAPACITY:
                break
            info[name] = empty
        return info


def trains_alone(timeline: Timeline, event: int) -> bool:
    """Whether this is training without a process group: no evaluation, and under torchrun no warm-up before a group."""
    from torch import is_grad_enabled

    if event not in TRAINING_EVENTS or (event == layout.FORWARD and not is_grad_enabled()):
        return False
    expects_group = int(number("WORLD_SIZE", default="1")) > 1
    return not expects_group or timeline.steps.count >= STEPS_WITHOUT_GROUP


def is_loader_worker() -> bool:
    """Whether a DataLoader has started this process."""
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
