"""What a check found, and the report of all of them: Markdown to read, JSON to compare with the next machine's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from testing.report import table as markdown

Outcome = Literal[
    "ok", "differs", "absent on both sides", "only we", "only nvidia-smi", "measured", "failed", "skipped"
]
# What wants to be looked at comes first.
ORDER: tuple[Outcome, ...] = (
    *("failed", "differs", "only nvidia-smi", "only we", "measured", "ok", "absent on both sides", "skipped"),
)


@dataclass(frozen=True)
class Check:
    """One line of the report. `measured` is a fact that no expectation belongs to; `failed` is a check that broke;
    `skipped` could not be made here."""

    part: str
    about: str
    outcome: Outcome
    ours: str = ""
    theirs: str = ""
    """nvidia-smi's value, or what the load is known to have done."""
    note: str = ""


def judge(
    part: str, about: str, ours: Sequence[float], theirs: float | None, slack: float = 0.0, note: str = ""
) -> Check:
    """Whether theirs lies within what ours were meanwhile, give or take `slack`."""
    shown = ("" if not ours else span(ours), "" if theirs is None else number(theirs))
    if not ours or theirs is None:
        return Check(part, about, missing(bool(ours), theirs is not None), *shown, note)
    fits = min(ours) - slack <= theirs <= max(ours) + slack
    return Check(part, about, "ok" if fits else "differs", *shown, note)


def surviving(part: str, about: str, checks: Iterable[Check]) -> Iterator[Check]:
    """The checks; and if an error ends them early, whatever it is, that it did, for the others are worth having."""
    try:
        yield from checks
    except Exception as error:
        yield Check(part, about, "failed", note=f"{type(error).__name__}: {error}")


def missing(ours: bool, theirs: bool) -> Outcome:
    """The outcome where not both sides say something."""
    if ours:
        return "only we"
    return "only nvidia-smi" if theirs else "absent on both sides"


def span(values: Sequence[float]) -> str:
    """One value, or from the least to the greatest."""
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} … {number(high)}"


def number(value: float) -> str:
    """With as many digits as a count of bytes or a unix time needs."""
    return f"{value:.15g}" if float(value).is_integer() or value > 1e6 else f"{value:.6g}"


def keep(path: Path, conditions: Mapping[str, object], checks: Sequence[Check]) -> None:
    """Write `path` (JSON) and the page beside it."""
    figures = {"conditions": conditions, "checks": [asdict(check) for check in checks]}
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(conditions, checks), encoding="utf-8")


def page(conditions: Mapping[str, object], checks: Sequence[Check]) -> str:
    """A summary, and a table for each part."""
    counts = Counter(check.outcome for check in checks)
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER if counts[outcome])
    where = "\n".join(f"- {name}: {value}" for name, value in conditions.items())
    head = f"# gpu_check\n\nMade by `make gpu-check`. {summary or 'No check was made'}.\n\n{where}\n"
    parts = dict.fromkeys(check.part for check in checks)
    return "\n".join([head, *(f"## {part}\n\n{_table(part, checks)}\n" for part in parts)])


def _table(part: str, checks: Sequence[Check]) -> str:
    chosen = sorted((check for check in checks if check.part == part), key=lambda check: ORDER.index(check.outcome))
    rows = [(c.about, c.outcome, c.ours, c.theirs, c.note) for c in chosen]
    head = ("check", "outcome", "exporter", "nvidia-smi or load", "note")
    return markdown(head, [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows])
