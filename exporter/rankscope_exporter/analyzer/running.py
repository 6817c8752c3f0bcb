"""The analyzer's threads: one asks the targets, another one judges each second that they have sent."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from rankscope_exporter.analyzer.metrics import AnalyzerCollector
from rankscope_exporter.analyzer.page import create_analyzer_app
from rankscope_exporter.analyzer.puller import Puller
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.analyzer.settings import AnalyzerFlags
from rankscope_exporter.analyzer.targets import Targets, parse_source
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.ranks.diagnosis_service import FindingFlags
from rankscope_exporter.worker import Worker

JUDGE_INTERVAL = 0.25
"""Seconds between two checks whether a second can be judged: the longest time for which an answer waits."""


class AnalyzerError(Exception):
    """A flag with a wrong value. The text names the flag, and has no secret."""


@contextmanager
def running(flags: AnalyzerFlags, settings: FindingFlags, address: str) -> Iterator[ASGIApp]:
    """Yield the pages, and ask the targets and judge until the context ends; then save the state.

    Raise AnalyzerError.
    """
    parts = [part for text in flags.analyze or () for part in map(str.strip, text.split(",")) if part]
    tls, credentials = _tls(flags.analyze_ca), _credentials(flags.analyze_credentials)
    try:
        targets = Targets([parse_source(part, tls) for part in parts])
    except ValueError as error:
        raise AnalyzerError(f"--analyze: {error} (see rankscope-exporter --help)") from error
    if not parts:
        raise AnalyzerError("--analyze: names no target (see rankscope-exporter --help)")
    analyzer = Analyzer(settings)
    puller = Puller(targets, analyzer, tls, credentials, address)
    collector = AnalyzerCollector(analyzer, puller.answers)
    judging = Worker("judge", JUDGE_INTERVAL, collector.poll, "cannot judge the runs", analyzer.close)
    with puller, judging:
        yield create_analyzer_app(Scrape([collector]), analyzer, collector)


def _tls(path: Path | None) -> ssl.SSLContext:
    """Return a context that accepts certificates of these CAs, by default of the system's. Raise AnalyzerError."""
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise AnalyzerError(f"--analyze.ca-file: {path}: {error.strerror or 'not a PEM file'}") from error


def _credentials(path: Path | None) -> str:
    """Return the header of the user and password in a file; empty without one. Raise AnalyzerError."""
    if path is None:
        return ""
    try:
        line = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AnalyzerError(f"--analyze.basic-auth-file: {path} cannot be read") from error
    if ":" not in line or "\n" in line:
        raise AnalyzerError(f"--analyze.basic-auth-file: {path} is not one line of USER:PASSWORD")
    return f"Basic {base64.b64encode(line.encode()).decode()}"
