"""Numbers that the training script gives. One that the record cannot hold is dropped, and costs nothing else."""

from __future__ import annotations

from rankscope.guard import logger
from rankscope.record.numbers import as_number


class ScriptNumbers:
    """Checks each number, and logs the first of each name that is dropped."""

    def __init__(self) -> None:
        self._dropped: set[str] = set()

    def accept(self, name: str, value: object) -> float:
        """Return the number, or 0 for one that the record cannot hold."""
        number = as_number(value)
        if number is None and name not in self._dropped:
            self._dropped.add(name)
            message = "rankscope: %s is not a finite number of 0 or more (type %s); such values are dropped"
            logger.warning(message, name, type(value).__name__)
        return number or 0.0
