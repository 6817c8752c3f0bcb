"""The flags of the analyzer. Their values are checked when it starts: an exporter does not load what that needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rankscope_exporter.flags import flag


def _url(text: str) -> str:
    """Return the URL of an HTTP server. Raise ArgumentTypeError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError("not a URL such as http://HOST:10417")
    return text


@dataclass(frozen=True, kw_only=True)
class AnalyzerFlags:
    """The settings of the analyzer."""

    analyze: Sequence[str] | None = flag(
        "--analyze",
        action="append",
        metavar="TARGETS",
        help="do not read this machine, but diagnose the runs that span the nodes of these exporters, separated by "
        "commas: HOST:PORT or URL, a file_sd file, dns:NAME:PORT for all addresses of a name, or "
        "prometheus+http://HOST:PORT for the targets of its jobs rankscope*; can be repeated",
    )
    analyzer_url: str | None = flag(
        "--analyzer.url",
        type=_url,
        metavar="URL",
        help="on a node: URL of the analyzer, with USER:PASSWORD@ if needed; the node's page and API then show what it "
        "finds in their runs that span nodes",
    )
    analyze_ca: Path | None = flag(
        "--analyze.ca-file",
        type=Path,
        metavar="FILE",
        help="certificates of the CAs of the targets and of a Prometheus, PEM (default: those of the system)",
    )
    analyze_credentials: Path | None = flag(
        "--analyze.basic-auth-file",
        type=Path,
        metavar="FILE",
        help="file with USER:PASSWORD for the targets, except those that a Prometheus lists",
    )
