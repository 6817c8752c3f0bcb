"""One check, and the report: Markdown to read, JSON to compare with another machine's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Literal, get_args

Outcome = Literal["failed", "differs", "one side", "measured", "ok", "absent"]
ORDER: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True)
class Check:
    """One line of the report; `__main__` lists the outcomes."""

    about: str
    outcome: Outcome
    ours: str = ""
    reference: str = ""
    note: str = ""


def judge(about: str, ours: Sequence[float], reference: float | None, tolerance: float = 0.0, note: str = "") -> Check:
    """Check that the reference is within the range of our values, extended by the tolerance at both ends."""
    shown = (show(*ours), "" if reference is None else show(reference), note)
    if not ours or reference is None:
        return Check(about, "one side" if ours or reference is not None else "absent", *shown)
    return Check(about, ok_if(min(ours) - tolerance <= reference <= max(ours) + tolerance), *shown)


def ok_if(condition: bool) -> Outcome:
    """Return the outcome of a condition that must hold."""
    return "ok" if condition else "differs"


def show(*values: float) -> str:
    """Format one value, or the range of several, with enough digits for counts of bytes."""
    ends = dict.fromkeys((min(values), max(values))) if values else ()
    return " … ".join(f"{value:.15g}" if value > 1e6 else f"{value:.6g}" for value in ends)


def write(path: Path, conditions: Mapping[str, object], results: Mapping[str, Sequence[Check]]) -> None:
    """Write the checks of each part to `path` as JSON, and as Markdown next to it, differences first."""
    parts = {part: [asdict(check) for check in checks] for part, checks in results.items()}
    path.write_text(json.dumps({"conditions": conditions, "parts": parts}, indent=1, ensure_ascii=False) + "\n")
    counts = Counter(check.outcome for checks in results.values() for check in checks)
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER if counts[outcome])
    lines = ["# On a real GPU", "", *(f"- {name}: {value}" for name, value in conditions.items()), "", f"{summary}."]
    for part, checks in results.items():
        lines += ["", f"## {part}", "", "| check | outcome | Rankscope | reference | note |", "|---|---|---|---|---|"]
        for check in sorted(checks, key=lambda check: ORDER.index(check.outcome)):
            cells = (cell.replace("|", "/").replace("\n", " ") for cell in astuple(check))
            lines.append(f"| {' | '.join(cells)} |")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
