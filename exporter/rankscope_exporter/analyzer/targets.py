"""The exporters that are asked: from addresses, a file_sd file, a DNS name or the targets of a Prometheus.

Credentials are for the names that the configuration has. What a Prometheus lists gets none: whoever can add a target
there would receive them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rankscope_exporter.analyzer.request import RequestError, Target, error_text, get
from rankscope_exporter.documents import DocumentError, read_document

DEFAULT_PORT, PROMETHEUS_PORT = 10417, 9090
TARGETS_LIMIT = 16_384
LOOKUP_TIMEOUT = 5.0
FILE, DNS, PROMETHEUS = "file:", "dns:", "prometheus+"
DNS_TLS = "dns+https:"
JOBS = "rankscope"
"""The beginning of the name of jobs whose targets are exporters, in a Prometheus."""
NO_EXPORTER = "analyzer"
"""The end of the name of jobs whose targets are analyzers."""
METRICS = "/metrics"
SUFFIXES = (".json", ".yml", ".yaml")
"""The ends of the names of file_sd files, as in Prometheus."""
HOST = re.compile(r"[\w:][\w.:%-]*", re.ASCII)
"""A name or an address, also of IPv6 with a zone."""

logger = logging.getLogger(__name__)


class _Group(BaseModel):
    """A group of targets in a file_sd file."""

    targets: Annotated[list[str], Field(max_length=TARGETS_LIMIT)]
    labels: dict[str, str] = {}


class _Active(BaseModel):
    url: Annotated[str, Field(alias="scrapeUrl")]
    labels: dict[str, str] = {}


class _Data(BaseModel):
    active: Annotated[list[_Active], Field(alias="activeTargets", max_length=8 * TARGETS_LIMIT)]


class _TargetsAnswer(BaseModel):
    data: _Data


def parse_target(text: str, scheme: str = "http", port: int = DEFAULT_PORT, *, is_configured: bool = True) -> Target:
    """Return the target of `HOST`, `HOST:PORT` or a URL, also of its metrics. Raise ValueError."""
    is_url = "//" in text
    try:
        url = urlsplit(text if is_url else f"//{text}", scheme=scheme)
        port = url.port or port
    except ValueError as error:  # such as a port that is no number; the text of the error lacks the target
        raise ValueError(_is_no_target(text)) from error
    is_plain = not (url.username or url.query or url.fragment) and text.isascii() and text.isprintable()
    is_address = HOST.fullmatch(url.hostname or "") and (is_url or not url.path)
    if url.scheme not in ("http", "https") or not is_address or not is_plain or " " in text:
        raise ValueError(_is_no_target(text))
    path = url.path.rstrip("/").removesuffix(METRICS)
    return Target(url.hostname or "", port, url.scheme == "https", path, "", is_configured)


def _is_no_target(text: str) -> str:
    return f"{text[:100]!r} is not HOST:PORT"


Find = Callable[[], Awaitable[Iterable[Target]]]


class Source(NamedTuple):
    """A source of targets."""

    text: str
    find: Find


def parse_source(text: str, tls: ssl.SSLContext | None = None) -> Source:
    """Return the source that a part of the flag's value names. Raise ValueError or DocumentError.

    `tls` checks the certificate of a Prometheus.
    """
    if text.startswith(FILE) or text.endswith(SUFFIXES):
        path = Path(text.removeprefix(FILE))
        of_file(path)  # a wrong path is an error at the start
        return Source(text, lambda: asyncio.to_thread(of_file, path))
    if text.startswith((DNS, DNS_TLS)):
        scheme = "https" if text.startswith(DNS_TLS) else "http"
        target = parse_target(text.removeprefix(DNS_TLS).removeprefix(DNS), scheme)
        return Source(text, lambda: _of_name(target))
    if text.startswith(PROMETHEUS):
        url, _, query = text.removeprefix(PROMETHEUS).partition("?")
        server = parse_target(url, port=PROMETHEUS_PORT)
        jobs = query.removeprefix("job=") or JOBS
        return Source(text, lambda: _of_prometheus(server, jobs, tls))
    if Path(text).is_file():
        raise ValueError(f"{text} is a file; the name of a file_sd file ends in {', '.join(SUFFIXES)}")
    target = parse_target(text)

    async def one() -> Iterable[Target]:
        return (target,)

    return Source(text, one)


def of_file(path: Path) -> Sequence[Target]:
    """Return the targets of a file_sd file. Raise DocumentError."""
    is_json = path.suffix == ".json"
    form, load = ("JSON", json.loads) if is_json else ("YAML", yaml.safe_load)
    return read_document(path, form, load, _of_groups)


def _of_groups(document: Any) -> Sequence[Target]:
    try:
        groups = TypeAdapter(list[_Group]).validate_python(document)
    except ValidationError as error:
        raise ValueError("not a list of groups with targets") from error
    return [parse_target(one, group.labels.get("__scheme__", "http")) for group in groups for one in group.targets]


async def _of_name(named: Target) -> Iterable[Target]:
    """Return a target for each address of a name. Certificates are checked for the name."""
    async with asyncio.timeout(LOOKUP_TIMEOUT):
        found = await asyncio.get_running_loop().getaddrinfo(named.host, named.port, type=socket.SOCK_STREAM)
    return [named._replace(host=str(address[0]), server_name=named.host) for *_, address in sorted(found)]


async def _of_prometheus(server: Target, jobs: str, tls: ssl.SSLContext | None) -> Iterable[Target]:
    """Return the active targets of jobs whose names begin so. They are not configured names."""
    body = await get(server, f"/api/v1/targets?{urlencode({'state': 'active'})}", {}, LOOKUP_TIMEOUT, tls)
    try:
        active = _TargetsAnswer.model_validate_json(body).data.active
    except ValidationError as error:
        raise RequestError("not an answer of /api/v1/targets") from error
    return _listed(
        one for one in active if (job := one.labels.get("job", "")).startswith(jobs) and not job.endswith(NO_EXPORTER)
    )


def _listed(active: Iterable[_Active]) -> Iterator[Target]:
    for one in active:
        with suppress(ValueError):
            yield parse_target(one.url.partition("?")[0], is_configured=False)


class Targets:
    """All targets now. A source that fails keeps its last ones."""

    def __init__(self, found: Iterable[Source]) -> None:
        self._sources = tuple(found)
        self._known: dict[str, Sequence[Target]] = {}
        self._failing: set[str] = set()

    async def find(self) -> Sequence[Target]:
        """Return the targets of all sources, each once."""
        for source in self._sources:
            await self._find(source)
        found: dict[str, Target] = {}
        for target in (one for known in self._known.values() for one in known):
            # A configured name stays one if a Prometheus lists it, too.
            if target.name not in found or target.is_configured:
                found[target.name] = target
        return [*found.values()][:TARGETS_LIMIT]

    async def _find(self, source: Source) -> None:
        try:
            found = [*await source.find()]
            if not found and self._known.get(source.text) != found:
                logger.warning("no targets source=%s", source.text)
            self._known[source.text] = found
            self._failing.discard(source.text)
        except (RequestError, DocumentError, OSError, UnicodeError) as error:
            reason = error_text(error) if isinstance(error, OSError) else error
            if source.text not in self._failing:
                logger.warning("cannot find targets source=%s error=%s", source.text, reason)
            self._failing.add(source.text)
