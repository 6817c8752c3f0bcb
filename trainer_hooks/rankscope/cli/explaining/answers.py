"""Validated answers of a Prometheus. The server at that address may be hostile, and users choose the names of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

LONGEST = 4096  # characters of a label's value, an annotation and a query
LARGEST = 1e18  # of a value: sums of thousands stay finite, and no counter of ours comes near
ALERT_PREFIX = "Rankscope"


class MalformedError(Exception):
    """The answer is not one of a Prometheus."""


@dataclass(frozen=True)
class Sample:
    """One series of an instant vector. `labels` do not contain the name."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class ActiveAlert:
    """An active alert of a rule."""

    labels: dict[str, str]
    annotations: dict[str, str]
    value: float | None
    since: str


@dataclass(frozen=True)
class Rule:
    """An alerting rule of Rankscope. `interval` is its group's in seconds, or None if unknown."""

    name: str
    query: str
    interval: float | None
    annotations: dict[str, str] = field(default_factory=dict)
    alerts: list[ActiveAlert] = field(default_factory=list)


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


def rules(data: object) -> list[Rule]:
    """Return Rankscope's alerting rules. Raises MalformedError."""
    groups = [_dict(group) for group in _list(_dict(data).get("groups"))]
    return [
        _rule(rule, _number(group.get("interval")))
        for group in groups
        for rule in map(_dict, _list(group.get("rules", [])))
        if rule.get("type") == "alerting" and _is_ours(rule.get("name"))
    ]


def _sample(series: Mapping[str, Any], needed: tuple[str, ...]) -> Sample:
    labels = _texts(series.get("metric"))
    _malformed_unless_all(needed, labels)
    value = _list(series.get("value"))
    number = _number(value[1]) if len(value) == 2 else None
    if number is None:
        _malformed()
    return Sample(labels.pop("__name__", ""), labels, number)


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith(ALERT_PREFIX)


def _rule(rule: Mapping[str, Any], interval: float | None) -> Rule:
    alerts = [_active(_dict(alert)) for alert in _list(rule.get("alerts") or [])]
    is_interval = interval is not None and 0 < interval <= LARGEST
    annotations = _words(rule.get("annotations") or {})
    return Rule(_text(rule["name"]), _text(rule.get("query")), interval if is_interval else None, annotations, alerts)


def _active(alert: Mapping[str, Any]) -> ActiveAlert:
    value, since = _number(alert.get("value")), alert.get("activeAt")
    is_value = value is not None and abs(value) <= LARGEST
    return ActiveAlert(
        labels=_texts(alert.get("labels")),
        annotations=_words(alert.get("annotations") or {}),
        value=value if is_value else None,
        since=since if isinstance(since, str) and len(since) < 100 else "",
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or len(str(value)[:101]) > 100:
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _words(value: object) -> dict[str, str]:
    """Return annotations, cut to the length that is shown."""
    return {name: _any_text(text)[:LONGEST] for name, text in _dict(value).items()}


def _texts(value: object) -> dict[str, str]:
    return {_text(name): _text(text) for name, text in _dict(value).items()}


def _text(value: object) -> str:
    text = _any_text(value)
    return text if len(text) <= LONGEST else _malformed()


def _any_text(value: object) -> str:
    return value if isinstance(value, str) else _malformed()


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else _malformed()


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else _malformed()


def _malformed_unless_all(needed: tuple[str, ...], labels: Mapping[str, str]) -> None:
    if any(name not in labels for name in needed):
        _malformed()


def _malformed() -> NoReturn:
    raise MalformedError
