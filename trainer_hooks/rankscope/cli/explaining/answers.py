"""Validated answers of a Prometheus. The server at that address may be hostile, and users choose the names of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

LONGEST = 4096  # characters of a label's value
LARGEST = 1e18  # of a value: sums of thousands stay finite, and no counter of ours comes near


class MalformedError(Exception):
    """The answer is not one of a Prometheus."""


@dataclass(frozen=True)
class Sample:
    """One series of an instant vector. `labels` do not contain the name."""

    name: str
    labels: dict[str, str]
    value: float


def data_of(body: bytes) -> object:
    """Return the `data` of an answer. Raises MalformedError."""
    try:
        return _dict(json.loads(body)).get("data")
    except (ValueError, RecursionError):  # brackets in thousands exhaust the parser's stack
        _malformed()


def error_of(body: bytes) -> str | None:
    """Return the error message of an answer: of Prometheus, of a gateway, or the first line of a plain text."""
    try:
        found = _dict(json.loads(body))
    except (ValueError, RecursionError, MalformedError):
        line = body.decode(errors="replace").strip().partition("\n")[0]
        return None if line[:1] in "<{[" else line
    error = found.get("error") or found.get("message")
    return error if isinstance(error, str) else None


def samples(data: object, needed: tuple[str, ...] = ()) -> list[Sample]:
    """Return an instant vector whose series all have the labels `needed`. Raises MalformedError.

    Skips NaN, and values that are too large for a series of Rankscope.
    """
    found = [_sample(_dict(series), needed) for series in _list(_dict(data).get("result"))]
    return [sample for sample in found if abs(sample.value) <= LARGEST]  # NaN is not


def _sample(series: Mapping[str, Any], needed: tuple[str, ...]) -> Sample:
    labels = _texts(series.get("metric"))
    _malformed_unless_all(needed, labels)
    value = _list(series.get("value"))
    number = _number(value[1]) if len(value) == 2 else None
    if number is None:
        _malformed()
    return Sample(labels.pop("__name__", ""), labels, number)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or len(str(value)[:101]) > 100:
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _texts(value: object) -> dict[str, str]:
    return {_text(name): _text(text) for name, text in _dict(value).items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= LONGEST else _malformed()


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else _malformed()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else _malformed()


def _malformed_unless_all(needed: tuple[str, ...], labels: Mapping[str, str]) -> None:
    if any(name not in labels for name in needed):
        _malformed()


def _malformed() -> NoReturn:
    raise MalformedError
