"""The output of `rankscope explain` on a node without a Prometheus."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankscope.cli.printable import printable
from rankscope.record.quantities import duration
from rankscope_exporter.diagnosis.standstill import INSIDE
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report import describe
from rankscope_exporter.report.findings import FindingReport
from rankscope_exporter.report.runs import NodeReport, RunReport
from rankscope_exporter.top.command import silence_logs, wait_until_judged
from rankscope_exporter.top.node import watch_node

FINDINGS_SHOWN = 3


def explain(run_dirs: Sequence[Path], run: str | None, owner: str | None, *, with_explained: bool = False) -> bool:
    """Print the explanation after about ten seconds. Return at once, with False, if there is no such run."""
    silence_logs()
    began = time.time()
    with watch_node(run_dirs) as node:
        try:
            if not select(node.reporter.report(), run, owner):
                return False
            wait_until_judged(node.reporter.report)
            selected = select(node.reporter.report(), run, owner)
        except OutdatedError:
            return False
    width = max(40, min(shutil.get_terminal_size((100, 24)).columns, 120))
    is_short = len(selected) > 1 and not with_explained
    lines = [
        "No Prometheus answers. Based on the last seconds of the ranks on this machine:",
        *(in_short(selected, began) if is_short else as_lines(selected, began, with_explained=with_explained)),
    ]
    sys.stdout.writelines(f"{wrapped}\n" for line in lines for wrapped in _wrap(printable(line), width))
    return True


def select(node: NodeReport, run: str | None, owner: str | None) -> Sequence[RunReport]:
    """Return the runs that match and have a living rank."""
    return [one for one in node.runs if one.living and run in (None, one.run) and owner in (None, one.owner)]


def as_lines(
    runs: Sequence[RunReport], watched_since: float | None = None, *, with_explained: bool = False
) -> Iterator[str]:
    """Yield the findings of each run, with their age and advice, and what is not a finding."""
    for run in runs:
        yield f"{describe.title(run)}: {', '.join(describe.summary(run))}"
        for one in run.findings[:FINDINGS_SHOWN]:
            yield _age_and_sentence(one, watched_since)
            yield f"  {one.advice}"
        if not run.is_judged:
            yield describe.undiagnosed_sentence(run)
            yield from (f"  {line}" for line in describe.known_here(run))
        elif not run.findings:
            yield _no_finding(run)
        yield from describe.notes(run, with_explained=with_explained)


def in_short(runs: Sequence[RunReport], watched_since: float | None = None) -> Iterator[str]:
    """Yield what is wrong with each of several runs in a line, the worst first."""
    yield f"{len(runs)} runs, the worst first (--run explains one, --all each of them)"
    for run in runs:
        found = [_age_and_sentence(one, watched_since) for one in run.findings]
        unknown = "" if run.is_judged else describe.undiagnosed_sentence(run)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        yield f"{describe.title(run)}: {found[0] if found else unknown or _no_finding(run)}{more}"


def _age_and_sentence(one: FindingReport, watched_since: float | None) -> str:
    return f"{one.severity.upper()} {describe.age(one, watched_since)}: {one.sentence}"


def _no_finding(run: RunReport) -> str:
    """Return that there is no finding, and which rank the others wait for if the run makes no progress."""
    if not any(map(describe.is_growing, run.pending)):
        return "No problem found."
    hang = next((one for one in run.pending if one.kind == "hang"), None)
    stalled = describe.stalled(run)
    if hang is None or hang.rank is None or hang.cause == INSIDE:
        return "No finding yet." if hang is None else f"No finding yet: no progress for {duration(stalled)}."
    return f"No finding yet: no progress for {duration(stalled)}, rank {hang.rank} in {hang.cause}."


def _wrap(line: str, width: int) -> Sequence[str]:
    indent = "  " if line.startswith("  ") else ""
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
