"""The landing page: is something wrong on this node, and where. Below it every run's ranks, and the GPUs."""

from __future__ import annotations

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

LEFT_OUT = {
    "truncated": "cut short",
    "foreign": "no rank records",
    "version": "of another version of Rankscope",
    "symlink": "symbolic links",
    "unreadable": "unreadable",
    "duplicate": "about a rank that is shown",
    "unnamed": "of a run without a name",
    "impossible_rank": "with a rank beyond the world size",
    "future_start": "that begin in the future",
    "too_many_files": "past the limit of files",
    "too_many_ranks": "past the limit of ranks",
    "too_many_names": "past the limit of new names",
}


def render_status(families: Sequence[Metric], reporter: Reporter | None = None, now: float | None = None) -> str:
    """Return the page as HTML. `now` is unix time."""
    values, now = Values(families), time.time() if now is None else now
    gpus = report_gpus(values, reporter.look() if reporter else None, now)
    try:
        node, error = reporter.report() if reporter else NodeReport(now, ()), ""
    except OutdatedError as outdated:
        node, error = NodeReport(now, ()), str(outdated)
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title(node, gpus))}</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style>
<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript></head>
<body>{_main(values, node, gpus, error)}
<nav><a href="/metrics">/metrics</a><a href="/api/v1/runs">/api/v1/runs</a><a href="/-/healthy">/-/healthy</a>\
<a href="/-/ready">/-/ready</a></nav>
<script>{SCRIPT}</script></body></html>"""


def _main(values: Values, node: NodeReport, gpus: Sequence[GpuReport], error: str) -> str:
    left_out = _left_out(values)
    no_rank = error or ("No rank is shown." if left_out else "No rank has left a record on this machine.")
    runs = "".join(run_section(run) for run in node.runs) or f'<p class="dim">{escape(no_rank)}</p>'
    return f"""<main><h1>Rankscope exporter <small>{escape(_headline(values))}</small></h1>
<p id="stale" class="bad" hidden></p>{verdict(node, gpus, error)}
{runs}{legend(node)}{left_out}
<h2>GPUs</h2>{gpu_table(gpus)}</main>"""


def _headline(values: Values) -> str:
    driver = values.by("rankscope_exporter_nvml_up").get((), 0.0)
    seen = values.by("rankscope_exporter_gpus_seen").get((), 0.0)
    expected = values.by("rankscope_exporter_gpus_expected").get((), 0.0)
    gpus = f"{seen:.0f} of {expected:.0f} GPUs answer" if driver else "no NVIDIA driver answers"
    if values.by("rankscope_exporter_gpus_released").get(()):
        gpus = "the GPUs are released: POST /-/resume"
    return f"version {__version__} · {gpus}"


def _left_out(values: Values) -> str:
    """Return a line about the files that are not shown, if there are any."""
    files = values.by("rankscope_exporter_rank_files_skipped", "reason")
    reasons = ", ".join(f"{count:.0f} {LEFT_OUT.get(reason, reason)}" for (reason,), count in files.items() if count)
    return f'<p class="dim">Files left out: {escape(reasons)}.</p>' if reasons else ""
