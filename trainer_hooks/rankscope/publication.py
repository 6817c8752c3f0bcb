"""When and where this process publishes its rank record, and what the record's info says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rankscope.guard import logger
from rankscope.process import identity
from rankscope.process.environment import number
from rankscope.record import layout
from rankscope.record.clock import boot_id
from rankscope.record.directory import opened, weakness
from rankscope.record.old_records import remove_old_records
from rankscope.record.text import replace_unprintable
from rankscope.record.writer import RankWriter, encode_info, run_directory
from rankscope.timeline.timeline import Timeline

ERROR_LIMIT = 200  # characters of a path or an error: a path may have thousands

# Events after which a process without a process group is surely training. Fetching data is none of them: a
# distributed script may look at its data before it knows its rank.
TRAINING_EVENTS = frozenset({layout.FORWARD, layout.BACKWARD, layout.OPTIMIZER})

STEPS_WITHOUT_GROUP = 20  # a warm-up before init_process_group is shorter


class Publication:
    """Publishes one record. `details` returns what its info has in addition to the rank's identity."""

    def __init__(self, writer: RankWriter, details: Callable[[], dict[str, Any]]) -> None:
        self._writer = writer
        self._details = details
        self._identity: dict[str, Any] = {}

    def publish(self) -> bool:
        """Publish the record. If that fails, log why and return False: training goes on without it."""
        self._identity = identity.describe()
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
            remove_old_records(directory, descriptor, self._identity)
        self._writer.publish(directory, identity.file_name(self._identity), self.info())

    def refresh(self) -> None:
        """Write the info again, once the rank's identity is known."""
        if self._identity:
            self._writer.write_info(self.info())

    def info(self) -> dict[str, Any]:
        """Return the record's info as of now, without the settings where they do not fit."""
        info = {**self._identity, "boot_id": boot_id(), **self._details()}
        fits = len(encode_info(info)) <= layout.INFO_CAPACITY
        return info if fits else {**info, "settings": {}}


def is_training(timeline: Timeline, event: int) -> bool:
    """Whether this event shows that this process trains, and is not a loader's worker."""
    return (identity.is_distributed() or _trains_alone(timeline, event)) and not _is_loader_worker()


def _trains_alone(timeline: Timeline, event: int) -> bool:
    """Whether this is training without a process group; under torchrun, where one may still come, after a while."""
    expects_group = int(number("WORLD_SIZE", default="1")) > 1
    return event in TRAINING_EVENTS and not (expects_group and timeline.steps.count < STEPS_WITHOUT_GROUP)


def _is_loader_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None
