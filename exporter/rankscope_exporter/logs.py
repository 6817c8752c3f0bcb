"""Log output on standard error, as logfmt or JSON: one line for each record, with the time in UTC."""

from __future__ import annotations

import json
import logging
import time


class StructuredFormatter(logging.Formatter):
    """Formats a log record as one line of logfmt or JSON."""

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self._write = json.dumps if log_format == "json" else logfmt

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line; of an exception only its type and message."""
        fields = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1]:
            fields["error"] = repr(record.exc_info[1])
        return self._write(fields)


def logfmt(fields: dict[str, str]) -> str:
    """Return the fields as `key=value` pairs; values with special characters are quoted as in JSON.

    Every character that is not printable is escaped: a file name may contain a terminal's control sequence.
    """
    return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: str) -> str:
    plain = value and all(character.isalnum() or character in "-_.:/+" for character in value)
    return value if plain else f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    return character if character.isprintable() and character not in '"\\' else json.dumps(character)[1:-1]


def configure(level: str, log_format: str) -> None:
    """Send all log records of the process to one handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(StructuredFormatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
