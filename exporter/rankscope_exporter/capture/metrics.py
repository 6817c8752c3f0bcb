"""The metrics of captures."""

from __future__ import annotations

from rankscope_exporter.exposition.metric import Declaration

REASONS = ("standstill", "hang", "crash")
FAILURES = ("no_space", "io", "timeout", "error")
WRITTEN = Declaration(
    "counter",
    "rankscope_exporter_captures_total",
    "Captures of runs that hang or crashed, by reason: a `standstill` before its finding, the finding `hang`, or a "
    "`crash`. Only with `--capture-dir`.",
    ("reason",),
)
FAILED = Declaration(
    "counter",
    "rankscope_exporter_captures_failed_total",
    "Captures that were not written, by reason: no space left (`no_space`), another error of the directory (`io`), not "
    "ready in time (`timeout`), or an `error` of the exporter. The next standstill is captured again.",
    ("reason",),
)
LATEST = Declaration(
    "gauge",
    "rankscope_run_capture_timestamp_seconds",
    "Time of the latest capture of a run on this node, and `path` of its folder on `node`. Shown as long as the run.",
    ("run", "owner", "node", "path"),
)
METRICS = (WRITTEN, FAILED, LATEST)
