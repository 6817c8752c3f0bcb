"""The top of the status page: the problems of each run and GPU, or that there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rankscope.record.quantities import count, duration
from rankscope_exporter.diagnosis.words import ALERTS
from rankscope_exporter.report import describe
from rankscope_exporter.report.findings import FindingReport
from rankscope_exporter.report.gpus import GpuProblem, GpuReport
from rankscope_exporter.report.runs import CAPTURED_KINDS, NodeReport, RunReport
from rankscope_exporter.web.table import prose

RUNBOOKS = "https://github.com/rankscope/rankscope/blob/main/docs/runbooks"
SOON = 600.0
"""Seconds: what alerts within this time if it lasts is a reason to look again."""
Problem = FindingReport | GpuProblem


@dataclass(frozen=True)
class Verdict:
    """The problems of a node, for a page."""

    kind: str
    """Gives its color: `bad`, `warn`, `good` or `unknown`."""
    short: str
    """In a few words, for the page's title."""
    html: str

    @property
    def box(self) -> str:
        """Return the box at the top of the page."""
        return f'<section class="verdict {self.kind}" aria-label="Verdict">{self.html}</section>'


def verdict(node: NodeReport, gpus: Sequence[GpuReport], error: str) -> Verdict:
    """Return the problems, the runs that are not diagnosed here, and then what may become an alert.

    Without any of the first two, a line says that there is no problem. `error` is the reason if the ranks are unknown.
    """
    found = [one for run in node.runs for one in run.findings]
    alerts = [one for one in node.gpu_problems if not one.remaining_seconds]
    problems: list[Problem] = sorted([*found, *alerts], key=lambda one: one.severity)
    others = describe.other_defects(gpus, node.gpu_problems, found)
    unknown = describe.undiagnosed(node.runs)
    is_pending = _is_pending(node)
    html = f'<p class="said">No data about the ranks: {prose(error)}.</p>' if error else ""
    captured = {id(one): describe.captured(run) for run in node.runs for one in run.findings}
    html += "".join(_problem(one, captured.get(id(one), "")) for one in problems)
    html += "".join(f'<p class="said">GPU {prose(gpu.index)} {prose(gpu.problem)}.</p>' for gpu in others)
    html += "".join(map(_undiagnosed, unknown))
    number = len(problems) + len(others)
    if not (error or number):
        html += _no_problem(node, gpus, is_pending)
    is_bad = bool(error) or any(one.severity == "critical" for one in problems)
    has_failed = any(rank.ended in describe.FAILED for run in unknown for rank in run.ranks)
    is_warning = number or is_pending or has_failed
    kind = "bad" if is_bad else "warn" if is_warning else "unknown" if unknown else "good"
    short = count(number, "problem") if number else "No data" if error else "Not diagnosed" if unknown else "No problem"
    return Verdict(kind, short + " yet" * (is_pending and short == "No problem"), html + _notes(node))


def _is_pending(node: NodeReport) -> bool:
    is_growing = any(describe.is_growing(one) for run in node.runs for one in run.pending)
    return is_growing or any(0.0 < one.remaining_seconds <= SOON for one in node.gpu_problems)


def _problem(one: Problem, captured: str = "") -> str:
    """Return a problem as HTML. `captured` is where the run's captures lie, in case that it hangs or has crashed."""
    kind = "bad" if one.severity == "critical" else "warn"
    age = describe.gpu_age(one) if isinstance(one, GpuProblem) else describe.age(one)
    evidence = f'<span class="evidence">{prose(one.evidence)}</span>' if isinstance(one, GpuProblem) else ""
    evidence += f'<span class="captured">{escape(captured)}</span>' if captured and one.kind in CAPTURED_KINDS else ""
    runbook = f'<a rel="noreferrer" href="{RUNBOOKS}/{ALERTS[one.kind]}.md">runbook</a>' if one.kind in ALERTS else ""
    return (
        f'<p><span class="said"><b class="{kind}">{one.severity.capitalize()}:</b> {prose(one.sentence)}</span> '
        f'<span class="age">{age}</span>{evidence}<span class="advice">{prose(one.advice)} {runbook}</span></p>'
    )


def _undiagnosed(run: RunReport) -> str:
    sentence, known = describe.undiagnosed_sentence(run), " ".join(describe.known_here(run))
    return f'<p><span class="said">{prose(sentence)}</span><span class="advice">{prose(known)}</span></p>'


def _no_problem(node: NodeReport, gpus: Sequence[GpuReport], is_pending: bool) -> str:
    judged = [run for run in node.runs if run.living and run.is_judged]
    ranks = sum(run.living for run in judged)
    checked = [count(len(judged), "run"), count(ranks, "rank")] if judged else []
    checked += [count(len(gpus), "GPU")] if gpus else []
    where = f" in {', '.join(checked)}" if checked else ""
    yet = " yet" if is_pending else ""
    if describe.undiagnosed(node.runs):
        return f'<p class="pending">Otherwise, no problem found{yet}{where}.</p>' if checked else ""
    kind = "warn" if is_pending else "good"
    return f'<p class="said"><b class="{kind}">No problem found{yet}</b>{where}.</p>'


def _notes(node: NodeReport) -> str:
    lines = [line for run in node.runs for line in describe.notes(run)]
    lines += [
        f"Not yet an alert: {one.sentence} (it has not lasted long enough, {duration(one.remaining_seconds)} more)"
        for one in node.gpu_problems
        if one.remaining_seconds and one.kind != "gpu_lost"  # the GPU's own problem says it at once
    ]
    return "".join(f'<p class="pending">{prose(line)}</p>' for line in lines)
