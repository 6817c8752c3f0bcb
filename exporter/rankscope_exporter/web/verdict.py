"""The top of the status page: the problems of each run and GPU, or that there are none."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rankscope.record.quantities import count, duration
from rankscope_exporter.report import describe
from rankscope_exporter.report.findings import FindingReport
from rankscope_exporter.report.gpus import GpuReport
from rankscope_exporter.report.runs import NodeReport, RunReport


def title(node: NodeReport, gpus: Sequence[GpuReport], program: str = "Rankscope exporter") -> str:
    """Return the page's title, with the number of problems."""
    problems = sum(len(run.findings) for run in node.runs) + sum(bool(gpu.problem) for gpu in gpus)
    return f"({problems}) {program}" if problems else program


def verdict(node: NodeReport, gpus: Sequence[GpuReport], error: str) -> str:
    """Return the problems, the runs that are not diagnosed here, and then findings that may become alerts.

    Without any of the first two, a line says that there is no problem.
    """
    if error:
        return box("bad", f"<p>No data about the ranks: {escape(error)}.</p>")
    findings = "".join(_finding(one) for run in node.runs for one in run.findings)
    problems = "".join(f"<p>GPU {escape(gpu.index)} {escape(gpu.problem)}.</p>" for gpu in gpus if gpu.problem)
    is_pending = any(describe.is_growing(one) for run in node.runs for one in run.pending)
    is_critical = any(one.severity == "critical" for run in node.runs for one in run.findings)
    unknown = describe.undiagnosed(node.runs)
    has_failed = any(rank.ended in describe.FAILED for run in unknown for rank in run.ranks)
    is_warning = findings or problems or is_pending or has_failed
    kind = "bad" if is_critical else "warn" if is_warning else "unknown" if unknown else "good"
    html = findings + problems + "".join(map(_undiagnosed, unknown))
    return box(kind, html + ("" if findings or problems else _no_problem(node, gpus, is_pending)) + _notes(node))


def box(kind: str, html: str) -> str:
    """Return the box at the top of the page; `kind` gives its color: `bad`, `warn`, `good` or `unknown`."""
    return f'<section class="verdict {kind}">{html}</section>'


def _finding(one: FindingReport) -> str:
    kind = "bad" if one.severity == "critical" else "warn"
    age = f"for {duration(one.age_seconds)}"
    return (
        f'<p><b class="{kind}">{escape(one.severity.capitalize())}:</b> {escape(one.sentence)} '
        f'<span class="age">{age}</span><span class="advice">{escape(one.advice)}</span></p>'
    )


def _undiagnosed(run: RunReport) -> str:
    sentence, known = describe.undiagnosed_sentence(run), " ".join(describe.known_here(run))
    return f'<p>{escape(sentence)}<span class="advice">{escape(known)}</span></p>'


def _no_problem(node: NodeReport, gpus: Sequence[GpuReport], is_pending: bool) -> str:
    judged = [run for run in node.runs if run.living and run.is_judged]
    ranks = sum(run.living for run in judged)
    checked = [count(len(judged), "run"), count(ranks, "rank")] if judged else []
    checked += [count(len(gpus), "GPU")] if gpus else []
    where = f" in {', '.join(checked)}" if checked else ""
    yet = " yet" if is_pending else ""
    if describe.undiagnosed(node.runs):
        return f'<p class="pending">Otherwise, no problem found{yet}{where}.</p>' if checked else ""
    return f'<p><b class="{"warn" if is_pending else "good"}">No problem found{yet}</b>{where}.</p>'


def _notes(node: NodeReport) -> str:
    lines = [line for run in node.runs for line in describe.notes(run)]
    return "".join(f'<p class="pending">{escape(line)}</p>' for line in lines)
