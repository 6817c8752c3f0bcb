"""The figures of README.md and docs/security.md are those of the pages of measurements and of the code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from docs.generate_figures import DOCUMENTS, ROOT, Figures, write_figures

NUMBER = re.compile(r"\d[\d.,]*(?: of \d[\d,]*|\s(?:µs|ms|s|minutes|hours|[KMG]i?B)\b|%)")
NO_FIGURES = {
    # nvidia-smi; the length that the benchmark sets; the scrape interval of rules
    "README.md": ["shows 100% the whole time", "DDP, steps of 100 ms | 100 ms |", "every 15 s"],
    "docs/security.md": ["SYN retries (1 s, 3 s)"],  # of Linux
}


def without_source(text: str, figures: Figures, no_figures: Iterable[str] = ()) -> list[str]:
    """Return the numbers with a unit that are neither among the figures nor in these parts of the text."""
    rest = write_figures(text, {key: [""] * len(values) for key, values in figures.items()})
    for part in no_figures:
        assert part in rest
        rest = rest.replace(part, "")
    return NUMBER.findall(rest)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_a_document_has_the_figures_of_the_pages_and_of_the_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == write_figures(text, DOCUMENTS[path]()), "run `make generate`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_number_with_a_unit_has_a_source(path: Path) -> None:
    assert without_source(path.read_text(encoding="utf-8"), DOCUMENTS[path](), NO_FIGURES[named(path)]) == []


def test_numbers_without_a_source_are_found() -> None:
    assert without_source("A step takes 5 ms, 1.5%\nand 64 KiB, in 3 of 4 runs of 2 s.", {"takes {} ms": [6]}) == [
        "1.5%",
        "64 KiB",
        "3 of 4",
        "2 s",
    ]


@pytest.mark.parametrize("text", ["no such text", "took 1 ms, took 2 ms"])
def test_a_figure_that_is_not_in_the_document_exactly_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="texts like 'took "):
        write_figures(text, {"took {} ms": [3]})


def test_only_the_figures_change() -> None:
    text = "It took\n 12.5 ms, and\n 3 of 4 passed."
    assert write_figures(text, {"took {} ms, and {} passed": [0.096, "10 of 11"]}) == (
        "It took\n 0.096 ms, and\n 10 of 11 passed."
    )


def test_make_generate_writes_the_figures() -> None:
    assert "$(BIN)/python docs/generate_figures.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
