"""A client for Prometheus' API: instant queries, with the standard library only."""

from __future__ import annotations

import base64
import functools
import http.client
import json
import os
import re
import ssl
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rankscope.cli.explaining import answers
from rankscope.cli.explaining.answers import MalformedError, Sample
from rankscope.cli.explaining.fetching import (
    NO_HEADERS,
    Answer,
    FetchError,
    fetch,
    proxy_of,
    reason_of,
    without_query,
)

ERROR_LENGTH = 300  # characters of a server's error message
HEADERS_VARIABLE = "RANKSCOPE_PROMETHEUS_HEADERS"
HEADERS_LIMIT = 64 * 1024  # bytes of a file of headers
NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)  # a token of RFC 9110
LOGIN = "log in with --url http://USER:PASSWORD@HOST:PORT or --header 'Authorization: Bearer TOKEN'"
TENANT = "name the tenant with --header 'X-Scope-OrgID: TENANT'"


class PrometheusError(Exception):
    """There is no answer; the text says why in one line, without the password."""


class UnreachableError(PrometheusError):
    """No server answers at the address."""


class Prometheus:
    """A server by its URL, which may have a path and, for basic auth, `USER:PASSWORD@`. Raises PrometheusError."""

    def __init__(
        self,
        url: str,
        at: float | None = None,
        fetch: Callable[[str, Mapping[str, str]], Answer] = fetch,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """Ask about the time `at` (unix seconds) or now, with `headers`, which replace the URL's password."""
        parts = _split(url)
        self.url = _without_password(parts).rstrip("/")
        self._headers = {**_credentials(parts), **headers}
        self._at = at
        self._fetch = fetch

    def query(self, expression: str, *needed: str) -> list[Sample]:
        """Return the instant vector of a PromQL expression, each series with the labels `needed`."""
        parameters = {"query": expression} | ({} if self._at is None else {"time": f"{self._at:.3f}"})
        answer = self.ask(f"query?{urllib.parse.urlencode(parameters)}")
        if answer.status != 200:
            raise PrometheusError(self._refusal(answer))
        try:
            return answers.samples(answers.data_of(answer.body), needed)
        except MalformedError:
            is_page = answer.body.lstrip()[:1] == b"<"
            what = f"it answers with a web page ({LOGIN})" if is_page else "unexpected answer"
            raise PrometheusError(f"{self._source(answer)} is not a Prometheus: {what}") from None

    def ask(self, path: str) -> Answer:
        """Return the server's answer, of any status, for a path below `/api/v1/`."""
        try:
            return self._fetch(f"{self.url}/api/v1/{path}", self._headers)
        except FetchError as error:
            raise PrometheusError(f"{self.url}{_through(self.url)}: {error}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"{_through(self.url)}: {reason_of(error)[:ERROR_LENGTH]} ({self._hint(error)})"
            raise UnreachableError(f"cannot reach {self.url}{why}") from None

    def _hint(self, error: Exception) -> str:
        if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
            return "set SSL_CERT_FILE to the certificate of its authority"
        return "set --url or NO_PROXY" if proxy_of(self.url) else "set --url"

    def _source(self, answer: Answer) -> str:
        """Return where an answer is from, for an error: with TLS, a proxy passes it on unread."""
        through = _through(self.url) if self.url.startswith("http:") else ""
        redirects = f" redirects to {without_query(answer.redirected)}, which" if answer.redirected else ""
        return f"{self.url}{through}{redirects}"

    def _refusal(self, answer: Answer) -> str:
        if answer.status == 404:
            return f"{self._source(answer)} is not a Prometheus: it has no /api/v1"
        why = (answers.error_of(answer.body) or answer.reason)[:ERROR_LENGTH]
        hint = f" ({TENANT if 'org id' in why else LOGIN})" if answer.status == 401 else ""
        return f"{self._source(answer)} answers {answer.status}: {why}{hint}"


def connector(
    given: Sequence[str], fetch: Callable[[str, Mapping[str, str]], Answer] = fetch
) -> Callable[[str, float | None], Prometheus]:
    """Return a function that connects to a URL with the headers of --header and of the environment.

    Each is `Name: value`, or `@FILE` with one a line; the last one of a name counts. They are read at the first call,
    which raises PrometheusError if one is wrong.
    """

    @functools.cache
    def headers() -> Mapping[str, str]:
        texts = [(HEADERS_VARIABLE, text) for text in _full_lines(os.environ.get(HEADERS_VARIABLE, ""))]
        texts += [("--header", text) for text in given]
        return dict(_header(source, line) for origin, text in texts for source, line in _lines(origin, text))

    return lambda url, at: Prometheus(url, at, fetch, headers())


def _lines(origin: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield a header, or those of the file that it names, each with its source for an error."""
    if not text.startswith("@"):
        yield origin, text
        return
    try:
        with Path(text[1:]).open(encoding="ascii") as file:
            content = file.read(HEADERS_LIMIT)
    except (OSError, ValueError) as error:
        raise PrometheusError(f"{origin} {text}: {reason_of(error)}") from None
    yield from ((f"{origin} {text}", line) for line in _full_lines(content))


def _full_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _header(source: str, line: str) -> tuple[str, str]:
    """Return the name and the value of a header. Raises PrometheusError, without the value, which may be secret."""
    name, colon, value = line.partition(":")
    value = value.strip()
    if not colon or not NAME.fullmatch(name):
        begin = re.split(r"[^\w-]", line, maxsplit=1)[0][:20]
        raise PrometheusError(f"{source}: '{begin}...' is not of the form 'Name: value'")
    if not value or not value.isascii() or not value.isprintable():
        raise PrometheusError(f"{source}: {name}: its value is {'not printable ASCII' if value else 'empty'}")
    return name.title(), value


def _through(url: str) -> str:
    """Return which proxy is asked for a URL, without its password, as a phrase for an error; empty without one."""
    proxy = proxy_of(url).rpartition("@")[2].rpartition("//")[2].rstrip("/")
    return f" through the proxy {proxy}" if proxy else ""


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


def _credentials(parts: urllib.parse.SplitResult) -> Mapping[str, str]:
    if parts.username is None:
        return NO_HEADERS
    pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def quoted(text: str) -> str:
    """Return the text as a string of PromQL."""
    return json.dumps(text, ensure_ascii=False)
