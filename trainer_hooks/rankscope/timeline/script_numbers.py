"""Numbers from the training script. One that the record cannot hold is dropped."""

from __future__ import annotations

from rankscope.guard import logger
from rankscope.record.numbers import as_number


class ScriptNumbers:
    """Checks each number, and logs the first dropped one of each name."""

    def __init__(self) -> None:
        self._dropped: set[str] = set()

    def accept(self, name: str, value: object) -> float:
        """Return the number, or 0 if the record cannot hold it."""
        number = as_number(value)
        if number is None and name not in self._dropped:
            self._dropped.add(name)
            message = "rankscope: %s is not a finite number of 0 or more (type %s); dropping such values"
            logger.warning(message, name, type(value).__name__)
        return number or 0.0
