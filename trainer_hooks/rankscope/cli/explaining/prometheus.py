"""A client for Prometheus' API: instant queries and alerting rules, with the standard library only."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.parse
from collections.abc import Callable
from typing import TypeVar

from rankscope.cli.explaining import answers
from rankscope.cli.explaining.answers import MalformedError, Rule, Sample
from rankscope.cli.explaining.fetching import Answer, FetchError, fetch

ResultT = TypeVar("ResultT")
ERROR_LENGTH = 300  # characters of a server's error message


class PrometheusError(Exception):
    """There is no answer; the text says why in one line, without the password."""


class UnreachableError(PrometheusError):
    """No server answers at the address."""


class Prometheus:
    """A server by its URL, which may have a path and, for basic auth, `USER:PASSWORD@`. Raises PrometheusError."""

    def __init__(self, url: str, at: float | None = None, fetch: Callable[[str, str], Answer] = fetch) -> None:
        """Ask about the time `at` (unix seconds) or now. `fetch` gets a URL with credentials."""
        parts = _split(url)
        self.url = _without_password(parts).rstrip("/")
        self._credentials = _credentials(parts)
        self._at = at
        self._fetch = fetch

    def query(self, expression: str, *needed: str) -> list[Sample]:
        """Return the instant vector of a PromQL expression, each series with the labels `needed`."""
        moment = {} if self._at is None else {"time": f"{self._at:.3f}"}
        data = self._get("query", query=expression, **moment)
        return self._understood(lambda: answers.samples(data, needed))

    def alert_rules(self) -> list[Rule]:
        """Return Rankscope's alerting rules with their active alerts; none if the server has none."""
        data = self._get("rules", type="alert")
        return self._understood(lambda: answers.rules(data))

    def evaluation_interval(self) -> float | None:
        """Return the seconds between two evaluations of Rankscope's alerts, or None if unknown."""
        return next((rule.interval for rule in self.alert_rules() if rule.interval is not None), None)

    def _get(self, path: str, **parameters: str) -> object:
        try:
            answer = self._fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", self._credentials)
        except FetchError as error:
            raise PrometheusError(f"{self.url}: {error}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = str(getattr(reason, "strerror", None) or reason)[:ERROR_LENGTH]
            raise UnreachableError(f"cannot reach {self.url}: {why} (set --url)") from None
        if answer.status != 200:
            raise PrometheusError(self._refusal(answer))
        return self._understood(lambda: answers.data_of(answer.body))

    def _understood(self, read: Callable[[], ResultT]) -> ResultT:
        try:
            return read()
        except MalformedError:
            raise PrometheusError(f"{self.url} is not a Prometheus: unexpected answer") from None

    def _refusal(self, answer: Answer) -> str:
        if answer.status == 401:
            return f"{self.url} needs a user and a password: --url http://USER:PASSWORD@HOST:PORT"
        if answer.status == 404:
            return f"{self.url} is not a Prometheus: it has no /api/v1"
        why = answers.error_of(answer.body) or answer.reason
        return f"{self.url} answers {answer.status}: {why[:ERROR_LENGTH]}"


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise PrometheusError(f"{url.rpartition('@')[2]} is not a URL such as http://localhost:9090")
    return parts


def _without_password(parts: urllib.parse.SplitResult) -> str:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _credentials(parts: urllib.parse.SplitResult) -> str:
    if parts.username is None:
        return ""
    pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def quoted(text: str) -> str:
    """Return the text as a string of PromQL."""
    return json.dumps(text, ensure_ascii=False)
