"""Asks a Prometheus, or what speaks its API: instant queries and the alerts' rules, by the standard library alone."""

from __future__ import annotations

import base64
import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any, TypeVar

ANSWERS_WITHIN = 20.0  # seconds; a query takes Prometheus milliseconds

Json = TypeVar("Json", list[Any], dict[str, Any])


class PrometheusError(Exception):
    """Why there is no answer, in one line, without the password."""


@dataclass(frozen=True)
class Sample:
    """One series of an instant vector. `labels` are without the name."""

    name: str
    labels: dict[str, str]
    value: float


class Prometheus:
    """A server by its URL, which may have a path and, for basic auth, `USER:PASSWORD@`. Raises PrometheusError."""

    def __init__(self, url: str, at: float | None = None) -> None:
        """Questions are about the moment `at` (unix seconds), or now."""
        parts = _split(url)
        self.url = _without_password(parts).rstrip("/")
        self._credentials = _credentials(parts)
        self._at = at

    def query(self, expression: str) -> list[Sample]:
        """The instant vector of a PromQL expression. What is not a number is left out, as it says nothing."""
        moment = {} if self._at is None else {"time": f"{self._at:.3f}"}
        found = self._get("query", list, "result", query=expression, **moment)
        samples = (_sample(series["metric"], float(series["value"][1])) for series in found)
        return [sample for sample in samples if math.isfinite(sample.value)]

    def alert_rules(self) -> list[dict[str, Any]]:
        """The alerting rules as they are now, with their active alerts; none where the server keeps no rules."""
        groups = self._get("rules", list, "groups", type="alert")
        return [rule for group in groups for rule in group["rules"] if rule.get("type") == "alerting"]

    def evaluation_interval(self) -> float | None:
        """Seconds between two evaluations of Rankscope's alerts; None where the server does not say."""
        groups = self._get("rules", list, "groups", type="alert")
        return next((g["interval"] for g in groups if "interval" in g and any(map(_is_ours, g["rules"]))), None)

    def _get(self, path: str, kind: type[Json], field: str, **parameters: str) -> Json:
        request = urllib.request.Request(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")  # noqa: S310 - http or https, see __init__
        if self._credentials:
            # Not to where a redirection leads.
            request.add_unredirected_header("Authorization", self._credentials)
        try:
            with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN) as answer:  # noqa: S310 - the same
                body = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise PrometheusError(self._refusal(error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or reason
            raise PrometheusError(f"cannot reach {self.url}: {why} (--url names the Prometheus)") from None
        return self._field(body, kind, field)

    def _field(self, body: bytes, kind: type[Json], field: str) -> Json:
        try:
            value = json.loads(body)["data"][field]
        except (ValueError, KeyError, TypeError):
            value = None
        if not isinstance(value, kind):
            raise PrometheusError(f"{self.url} is no Prometheus: it does not answer as one")
        return value

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        if error.code == 401:
            return f"{self.url} wants a user and a password: --url http://USER:PASSWORD@HOST:PORT"
        if error.code == 404:
            return f"{self.url} is no Prometheus: it has no /api/v1"
        try:
            why = str(json.loads(error.read())["error"])
        except (OSError, ValueError, KeyError, TypeError):
            why = str(error.reason)
        return f"{self.url} answers {error.code}: {why}"


def _is_ours(rule: dict[str, Any]) -> bool:
    return str(rule.get("name")).startswith("Rankscope")


def _sample(labels: dict[str, str], value: float) -> Sample:
    return Sample(labels.get("__name__", ""), {k: v for k, v in labels.items() if k != "__name__"}, value)


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_one = False
    if not is_one:
        raise PrometheusError(f"{url.rpartition('@')[2]} is no URL such as http://localhost:9090")
    return parts


def _without_password(parts: urllib.parse.SplitResult) -> str:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _credentials(parts: urllib.parse.SplitResult) -> str:
    if parts.username is None:
        return ""
    pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def quoted(text: str) -> str:
    """As a string of PromQL."""
    return json.dumps(text, ensure_ascii=False)
