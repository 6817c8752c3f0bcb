"""The status page: the problems of this node, then the ranks of each run and the GPUs."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from html import escape

from prometheus_client.core import Metric

from rankscope import __version__
from rankscope.record.quantities import utc
from rankscope_exporter.ranks.collectors.ranks import SKIP_REASONS
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report.gpus import GpuReport, report_gpus
from rankscope_exporter.report.rates import RecentRates
from rankscope_exporter.report.runs import NodeReport, Reporter
from rankscope_exporter.report.values import Values
from rankscope_exporter.web.status_assets import ICON, REFRESH_SECONDS, SCRIPT, STYLE
from rankscope_exporter.web.status_gpus import gpu_section
from rankscope_exporter.web.status_runs import legend, run_section
from rankscope_exporter.web.table import prose
from rankscope_exporter.web.verdict import Verdict, verdict

PROGRAM = "Rankscope exporter"
NO_RUN = (
    "No rank records on this machine. To see a run here, start its training on this node with "
    "`rankscope run -- torchrun train.py`."
)
PREFIX = re.compile(r"(/[\w.~%@:+=-]+)+/?", re.ASCII)


def render_status(
    families: Sequence[Metric], reporter: Reporter | None = None, now: float | None = None, name: str = ""
) -> str:
    """Return the page as HTML. `now` is Unix time, and `name` the node's name."""
    values, now = Values(families), time.time() if now is None else now
    reporter = reporter or Reporter(lambda: Scan([], Counter()), lambda: None)
    gpus = report_gpus(values, reporter.look(), now)
    try:
        node, error = reporter.report(), ""
    except OutdatedError as outdated:
        node, error = NodeReport(now, (), reporter.check_gpus(lambda: ())), str(outdated)
    found = verdict(node, gpus, error)
    return as_page(
        found, " · ".join(filter(None, (name, PROGRAM))), head(name or PROGRAM, _headline(values), now),
        _main(values, node, gpus, reporter.rates, error),
    )  # fmt: skip


def as_page(found: Verdict, name: str, header: str, main: str) -> str:
    """Return the page with this name; `header` and `main` are the HTML in these elements."""
    title = f"<title>{escape(found.short)} · {escape(name)}</title>"
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">{title}
<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="{ICON}"><style>{STYLE}</style>
<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript></head>
<body><p id="heard" class="heard" role="status" aria-live="polite"></p>
<header>{header}<p id="stale" role="alert" hidden></p></header>
<main>{found.box}{main}</main>
<nav aria-label="Other pages"><a href="metrics">/metrics</a><a href="api/v1/runs">/api/v1/runs</a>\
<a href="-/healthy">/-/healthy</a><a href="-/ready">/-/ready</a></nav>
<script>{SCRIPT}</script></body></html>"""


def head(name: str, about: str, now: float) -> str:
    """Return the heading: what the page is about, and when it was made."""
    at = utc(now)
    return f"<h1>{escape(name)} <small>{escape(about)} · {at}</small></h1>"


def link_below(page: str, prefix: str) -> str:
    """Return the page with links below the prefix under which a reverse proxy shows it; as it is, if that is no path.

    A relative link is wrong if the page's URL is the prefix without a slash at its end.
    """
    return page.replace('<a href="', f'<a href="{prefix.rstrip("/")}/') if PREFIX.fullmatch(prefix) else page


def _main(values: Values, node: NodeReport, gpus: Sequence[GpuReport], rates: RecentRates, error: str) -> str:
    skipped = _skipped_files(values)
    no_rank = "" if error else "No rank to show." if skipped else NO_RUN
    runs = "".join(run_section(run, rates.steps((run.run, run.owner))) for run in node.runs)
    runs = runs or f'<p class="dim">{prose(no_rank)}</p>'
    return f"{runs}{legend(node)}{skipped}\n{gpu_section(gpus, node.gpu_problems, rates)}"


def _headline(values: Values) -> str:
    driver = values.by("rankscope_exporter_nvml_up").get(())
    seen, expected = (values.by(f"rankscope_exporter_gpus_{name}").get(()) for name in ("seen", "expected"))
    gpus = "" if driver else "NVIDIA driver not available"
    if driver and seen is not None and expected is not None:
        gpus = f"{seen:.0f} of {expected:.0f} GPUs answer"
    if values.by("rankscope_exporter_gpus_released").get(()):
        gpus = "GPUs released; reacquire them with POST /-/resume"
    return " · ".join(filter(None, (f"{PROGRAM} {__version__}", gpus)))


def _skipped_files(values: Values) -> str:
    """Return a line with the number of skipped files by reason; empty if there are none."""
    files = values.by("rankscope_exporter_rank_files_skipped", "reason")
    counts = [f"{SKIP_REASONS[reason]} ({count:.0f})" for (reason,), count in files.items() if count]
    return f'<p class="dim">Skipped files: {escape(", ".join(counts))}.</p>' if counts else ""
