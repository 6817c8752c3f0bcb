"""The exporters that are asked: a list of addresses, which later sources extend."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

DEFAULT_PORT = 10417
TARGETS_LIMIT = 16_384


class Target(NamedTuple):
    """An exporter's address."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""
    """A prefix of the path, as behind a reverse proxy; without a slash at its end."""

    @property
    def name(self) -> str:
        """The address as text."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


def parse_target(text: str) -> Target:
    """Return the target of `HOST`, `HOST:PORT` or a URL. Raise ValueError."""
    url = urlsplit(text if "//" in text else f"//{text}", scheme="http")
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query or url.fragment:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return Target(url.hostname, url.port or DEFAULT_PORT, url.scheme == "https", url.path.rstrip("/"))


def sources(text: str) -> Sequence[str]:
    """Return the sources in a flag's value, which commas separate. Raise ArgumentTypeError."""
    found = [one for one in map(str.strip, text.split(",")) if one]
    try:
        for one in found:
            parse_target(one)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


class Targets:
    """All targets now."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._static = tuple(map(parse_target, texts))

    async def find(self) -> Sequence[Target]:
        """Return the targets of all sources, each once."""
        return list(dict.fromkeys(self._all()))[:TARGETS_LIMIT]

    def _all(self) -> Iterator[Target]:
        yield from self._static
