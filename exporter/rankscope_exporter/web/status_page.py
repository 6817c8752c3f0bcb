"""The status page: the problems of this node, then the ranks of each run and the GPUs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from html import escape

from prometheus_client.core import Metric

from rankscope import __version__
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report.gpus import GpuReport, report_gpus
from rankscope_exporter.report.runs import NodeReport, Reporter
from rankscope_exporter.report.values import Values
from rankscope_exporter.web.status_assets import REFRESH_SECONDS, SCRIPT, STYLE
from rankscope_exporter.web.status_gpus import gpu_table
from rankscope_exporter.web.status_runs import legend, run_section
from rankscope_exporter.web.verdict import title, verdict

PREFIX = re.compile(r"(/[\w.~%@:+=-]+)+/?", re.ASCII)
SKIP_REASON_TEXTS = {
    "truncated": "truncated",
    "foreign": "no rank record",
    "version": "another version of Rankscope",
    "symlink": "symbolic link",
    "unreadable": "unreadable",
    "duplicate": "duplicate rank",
    "unnamed": "no run name",
    "impossible_rank": "rank outside the world size",
    "future_start": "start time in the future",
    "too_many_files": "over the limit of files",
    "too_many_ranks": "over the limit of ranks",
    "too_many_names": "over the limit of new names",
}


def render_status(families: Sequence[Metric], reporter: Reporter | None = None, now: float | None = None) -> str:
    """Return the page as HTML. `now` is Unix time."""
    values, now = Values(families), time.time() if now is None else now
    gpus = report_gpus(values, reporter.look() if reporter else None, now)
    try:
        node, error = reporter.report() if reporter else NodeReport(now, ()), ""
    except OutdatedError as outdated:
        node, error = NodeReport(now, ()), str(outdated)
    return as_page(title(node, gpus), _main(values, node, gpus, error))


def as_page(name: str, main: str) -> str:
    """Return the page with this title and the main element, which is HTML."""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style>
<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript></head>
<body>{main}
<nav><a href="metrics">/metrics</a><a href="api/v1/runs">/api/v1/runs</a><a href="-/healthy">/-/healthy</a>\
<a href="-/ready">/-/ready</a></nav>
<script>{SCRIPT}</script></body></html>"""


def link_below(page: str, prefix: str) -> str:
    """Return the page with links below the prefix under which a reverse proxy shows it; as it is, if that is no path.

    A relative link is wrong if the page's URL is the prefix without a slash at its end.
    """
    return page.replace('<a href="', f'<a href="{prefix.rstrip("/")}/') if PREFIX.fullmatch(prefix) else page


def _main(values: Values, node: NodeReport, gpus: Sequence[GpuReport], error: str) -> str:
    skipped = _skipped_files(values)
    no_rank = error or ("No rank to show." if skipped else "No rank records on this machine.")
    runs = "".join(run_section(run) for run in node.runs) or f'<p class="dim">{escape(no_rank)}</p>'
    return f"""<main><h1>Rankscope exporter <small>{escape(_headline(values))}</small></h1>
<p id="stale" class="bad" hidden></p>{verdict(node, gpus, error)}
{runs}{legend(node)}{skipped}
<h2>GPUs</h2>{gpu_table(gpus)}</main>"""


def _headline(values: Values) -> str:
    driver = values.by("rankscope_exporter_nvml_up").get((), 0.0)
    seen = values.by("rankscope_exporter_gpus_seen").get((), 0.0)
    expected = values.by("rankscope_exporter_gpus_expected").get((), 0.0)
    gpus = f"{seen:.0f} of {expected:.0f} GPUs answer" if driver else "NVIDIA driver not available"
    if values.by("rankscope_exporter_gpus_released").get(()):
        gpus = "GPUs released; reacquire them with POST /-/resume"
    return f"version {__version__} · {gpus}"


def _skipped_files(values: Values) -> str:
    """Return a line with the number of skipped files by reason; empty if there are none."""
    files = values.by("rankscope_exporter_rank_files_skipped", "reason")
    counts = [f"{SKIP_REASON_TEXTS.get(reason, reason)} ({count:.0f})" for (reason,), count in files.items() if count]
    return f'<p class="dim">Skipped files: {escape(", ".join(counts))}.</p>' if counts else ""
