"""Answers of an exporter that root on its node has forged."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from testing.http_server import answers, http_server

from rankscope_exporter.analyzer.puller import Puller
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.analyzer.targets import Targets, parse_source
from rankscope_exporter.node_facts.wire import VERSION, Answer

MIB = 2**20
EVIL = "http://evil:10417"


def rank(number: int, at: float, run: str = "r", owner: str = "0", **reading: Any) -> dict[str, Any]:
    """Return a living rank of a run of two nodes."""
    known = {"rank": number, "at": at, "began": 0.0, "world_size": 4, "group": "0-3", "last_progress": at}
    return {"run": [run, owner], "reading": {**known, **reading}}


def document(
    at: float, ranks: Sequence[Mapping[str, Any]] = (), node: str = "evil", boot: str = "boot of evil", **more: Any
) -> dict[str, Any]:
    """Return an answer with one moment."""
    moments = [{"at": at, "ranks": ranks}]
    return {"version": VERSION, "node": node, "boot": boot, "now": at, "moments": moments, **more}


def answer(*arguments: Any, **options: Any) -> Answer:
    """Return a forged answer that the analyzer accepts."""
    return Answer.model_validate_json(json.dumps(document(*arguments, **options)))


@contextmanager
def asked(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[Puller, Analyzer]]:
    """Let an analyzer ask a server with these answers."""
    analyzer = Analyzer()
    with http_server(answer) as port, Puller(Targets([parse_source(f"127.0.0.1:{port}")]), analyzer) as puller:
        yield puller, analyzer


def reasons(puller: Puller) -> list[str]:
    """Return why the targets did not answer when they were last asked."""
    return [reason for reason in puller.failures.values() if reason]


__all__ = ["EVIL", "MIB", "answer", "answers", "asked", "document", "rank", "reasons"]
