"""Log lines on standard error, as logfmt or JSON: one line each, time in UTC."""

from __future__ import annotations

import json
import logging
import time


class StructuredFormatter(logging.Formatter):
    """Each record as an ordered set of fields, in either notation."""

    def __init__(self, notation: str) -> None:
        super().__init__()
        self._write = json.dumps if notation == "json" else logfmt

    def format(self, record: logging.LogRecord) -> str:
        """One line; an exception is reduced to its type and message."""
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
    """`key=value` pairs; values with anything but plain characters are quoted as in JSON.

    What is not printable is escaped beyond JSON's needs: a file's name may hold a terminal's control sequence.
    """
    return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: str) -> str:
    plain = value and all(character.isalnum() or character in "-_.:/+" for character in value)
    return value if plain else f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    return character if character.isprintable() and character not in '"\\' else json.dumps(character)[1:-1]


def configure(level: str, notation: str) -> None:
    """Send every log line of the process through one handler."""
    handler = logging.StreamHandler()
    handler.setFormatter(StructuredFormatter(notation))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
