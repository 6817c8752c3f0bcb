"""The flags of the analyzer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope_exporter.analyzer.targets import sources
from rankscope_exporter.flags import flag


@dataclass(frozen=True, kw_only=True)
class AnalyzerFlags:
    """The settings of the analyzer."""

    analyze: Sequence[str] = flag(
        "--analyze",
        type=sources,
        action="extend",
        metavar="TARGETS",
        help="do not read this machine, but diagnose the runs that span the nodes of these exporters: HOST:PORT or "
        "URL, separated by commas; can be repeated",
    )
