"""Asks a Prometheus, or what speaks its API: instant queries and the alerts' rules, by the standard library alone."""

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
SAID = 300  # characters of what a server says of an error


class PrometheusError(Exception):
    """Why there is no answer, in one line, without the password."""


class UnreachableError(PrometheusError):
    """No server answers there."""


class Prometheus:
    """A server by its URL, which may have a path and, for basic auth, `USER:PASSWORD@`. Raises PrometheusError."""

    def __init__(self, url: str, at: float | None = None, fetch: Callable[[str, str], Answer] = fetch) -> None:
        """Questions are about the moment `at` (unix seconds), or now. `fetch` gets a page, with credentials."""
        parts = _split(url)
        self.url = _without_password(parts).rstrip("/")
        self._credentials = _credentials(parts)
        self._at = at
        self._fetch = fetch

    def query(self, expression: str, *needed: str) -> list[Sample]:
        """The instant vector of a PromQL expression, each series with the labels `needed`."""
        moment = {} if self._at is None else {"time": f"{self._at:.3f}"}
        data = self._get("query", query=expression, **moment)
        return self._understood(lambda: answers.samples(data, needed))

    def alert_rules(self) -> list[Rule]:
        """Rankscope's alerting rules as they are now, with their active alerts; none where the server keeps none."""
        data = self._get("rules", type="alert")
        return self._understood(lambda: answers.rules(data))

    def evaluation_interval(self) -> float | None:
        """Seconds between two evaluations of Rankscope's alerts; None where the server does not say."""
        return next((rule.interval for rule in self.alert_rules() if rule.interval is not None), None)

    def _get(self, path: str, **parameters: str) -> object:
        try:
            answer = self._fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", self._credentials)
        except FetchError as error:
            raise PrometheusError(f"{self.url}: {error}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = str(getattr(reason, "strerror", None) or reason)[:SAID]
            raise UnreachableError(f"cannot reach {self.url}: {why} (--url names the Prometheus)") from None
        if answer.status != 200:
            raise PrometheusError(self._refusal(answer))
        return self._understood(lambda: answers.data_of(answer.body))

    def _understood(self, read: Callable[[], ResultT]) -> ResultT:
        try:
            return read()
        except MalformedError:
            raise PrometheusError(f"{self.url} is no Prometheus: it does not answer as one") from None

    def _refusal(self, answer: Answer) -> str:
        if answer.status == 401:
            return f"{self.url} wants a user and a password: --url http://USER:PASSWORD@HOST:PORT"
        if answer.status == 404:
            return f"{self.url} is no Prometheus: it has no /api/v1"
        why = answers.error_of(answer.body) or answer.reason
        return f"{self.url} answers {answer.status}: {why[:SAID]}"


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
