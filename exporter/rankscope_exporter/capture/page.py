"""The page of a capture: one sentence first, then the ranks, then every source. It needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from rankscope.record.quantities import count, duration, size, utc
from rankscope_exporter.capture.ranks import CapturedRank
from rankscope_exporter.capture.request import Request
from rankscope_exporter.web.status_assets import STYLE
from rankscope_exporter.web.table import Cell, Column, Row, prose, table

SHOWN = 64 * 1024
"""Characters of a source on the page. Its file has all of them."""
COLUMNS = (
    Column("rank"),
    Column("GPU"),
    Column("phase"),
    Column("stands in"),
    Column("in collective"),
    Column("issued", is_number=True),
    Column("steps", is_number=True),
    Column("last checkpoint", is_number=True),
    Column("process"),
    Column("pid", is_number=True),
)
WHY = {
    "standstill": "no rank of the run on this node had made progress for a while",
    "hang": "the diagnosis found that the run hangs",
    "crash": "a rank crashed",
    "manual": "a user ran rankscope capture",
}


class Outcome(NamedTuple):
    """The outcome of one source."""

    name: str
    """The name of its file."""
    title: str
    text: str
    reason: str = ""
    """Why there is no text."""
    seconds: float = 0.0


def page(request: Request, sentence: str, at: float, ranks: Sequence[CapturedRank], outcomes: Sequence[Outcome]) -> str:
    """Return the page as HTML."""
    about = f"user ID {request.owner} · {request.node} · {utc(at)} · captured because {WHY[request.reason]}"
    title = f"Run {request.title}"
    said = f'<section class="verdict bad" aria-label="Verdict"><p class="said">{prose(sentence)}</p>'
    said += f"{''.join(_found(request))}</section>"
    names = table(COLUMNS, [_row(one) for one in ranks], f"Ranks of run {request.title}", "No rank is left to read.")
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(sentence)}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}{OWN_STYLE}</style></head>
<body><header><h1>{escape(title)} <small>{escape(about)}</small></h1></header>
<main>{said}<h2>Ranks <small>{count(len(ranks), "rank")} on this node</small></h2>{names}
{"".join(map(_source, outcomes))}</main></body></html>
"""


OWN_STYLE = """
details{margin:.6rem 0}summary{cursor:pointer;font-weight:600}summary small{font-weight:400;color:var(--dim)}
pre{font:13px/1.45 ui-monospace,monospace;overflow-x:auto;border-left:2px solid var(--line);padding-left:.8rem}
"""


def _found(request: Request) -> Iterator[str]:
    found = request.found
    if found:
        is_pending = "" if found.is_alert else " Not yet an alert: it has not lasted long enough."
        yield f'<p><span class="evidence">{prose(found.evidence)}</span>'
        yield f'<span class="advice">{prose(found.advice + is_pending)}</span></p>'
    for one in request.others:
        if not found or one != found.sentence:
            yield f'<p><span class="said">{prose(one)}</span></p>'


def _row(one: CapturedRank) -> Row:
    snapshot = one.recorded.snapshot
    saved = snapshot.unix_field("checkpoint_last_unix") if snapshot["checkpoints"] else None
    now = snapshot.unix(snapshot.read_monotonic)
    main = one.process.main if one.process else None
    cells = (
        Cell(str(one.number)),
        Cell(one.wanted.gpu),
        Cell(phase(one)),
        Cell(str(one.frame or "")),
        Cell(snapshot.open_operation),
        Cell(f"{sum(snapshot.issued.values()):.0f}"),
        Cell(f"{snapshot['steps']:.0f}"),
        Cell("" if saved is None else f"{duration(max(now - saved, 0.0))} ago"),
        Cell("stopped" if one.is_stopped else ", ".join(filter(None, (main.state, main.call))) if main else one.hidden),
        Cell(str(snapshot.lock_pid or "")),
    )
    return Row(cells)


def phase(one: CapturedRank) -> str:
    """Return a rank's phase and for how long, or how it ended."""
    snapshot = one.recorded.snapshot
    if not snapshot.alive:
        return f"ended ({snapshot.exit_reason})"
    return f"{snapshot.phase} for {duration(max(snapshot.read_monotonic - snapshot.phase_since, 0.0))}"


def _source(one: Outcome) -> str:
    if not one.text:
        return f'<p class="dim">{escape(one.title)}: {escape(one.reason)}.</p>'
    shown = one.text if len(one.text) <= SHOWN else f"{one.text[:SHOWN]}\n(more in {one.name})"
    bytes_ = size(len(one.text.encode(errors="replace")))
    about = f'<small>{bytes_}, <a href="{escape(one.name)}">{escape(one.name)}</a></small>'
    is_open = " open" * (one.name in ("collectives.txt", "stacks.txt"))
    return f"<details{is_open}><summary>{escape(one.title)} {about}</summary><pre>{escape(shown)}</pre></details>"
