"""Scrape /metrics every half second, measure the latency, and look for the victim's ranks.

    python -m validation.siege.scraper SCHEME HOST PORT SOURCE USER PASSWORD > FILE

Each scrape has a new connection, the slowest case, and a line of JSON. SIGTERM ends it.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass

from validation.siege.clients import basic
from validation.siege.target import RUN, VICTIM, any_server

EVERY = 0.5  # seconds
TIMEOUT = 10.0  # Prometheus's own
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
UP = re.compile(r"^rankscope_rank_up\{([^}]*)\} 1(?:\.0)?$", re.M)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Scraped:
    """One scrape; `error` is empty if it was answered with a page, and then `ranks` are the victim's live ranks."""

    at: float  # unix time
    seconds: float
    error: str = ""
    ranks: tuple[str, ...] = ()
    size: int = 0  # bytes of the page
    connected: float = 0.0  # seconds until there was a connection


def connection_to(scheme: str, host: str, port: int, source: str) -> http.client.HTTPConnection:
    """Return a connection that is not open yet, for `http` or `https`."""
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT, source_address=(source, 0))
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, source_address=(source, 0), context=any_server())


def scrape(connection: http.client.HTTPConnection, headers: dict[str, str]) -> Scraped:
    at, began, error, body, connected = time.time(), time.perf_counter(), "", b"", 0.0
    try:
        connection.connect()
        connected = time.perf_counter() - began
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        error = "" if answer.status == http.client.OK else str(answer.status)
    except (OSError, http.client.HTTPException) as problem:
        error = repr(problem)
    finally:
        connection.close()
    seconds = time.perf_counter() - began
    if error:
        return Scraped(at, seconds, error, connected=connected)
    page = gzip.decompress(body).decode()
    return Scraped(at, seconds, "", victims(page), len(page), connected)


def victims(page: str) -> tuple[str, ...]:
    """Return the live ranks of the victim's own run on the page."""
    found = (dict(LABEL.findall(labels)) for labels in UP.findall(page))
    mine = (labels["rank"] for labels in found if labels["run"] == RUN and labels["owner"] == str(VICTIM))
    return tuple(sorted(mine))


def main() -> None:
    """Scrape until SIGTERM, or until the parent has ended."""
    scheme, host, port, source, user, password = sys.argv[1:]
    word = basic(user, password).decode().partition(": ")[2]
    headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip", "Authorization": word, "Connection": "close"}
    parent, due = os.getppid(), time.monotonic()
    while os.getppid() == parent:
        print(json.dumps(asdict(scrape(connection_to(scheme, host, int(port), source), headers))), flush=True)
        due = max(due + EVERY, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
