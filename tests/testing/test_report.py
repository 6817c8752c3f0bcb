"""A report states how it was measured, and a ledger knows which runs are done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from testing import report
from testing.report import Directories, Ledger, Report

ABOUT = """Measure eggs.

    python -m benchmarks.eggs --save

They are weighed.
"""


def made() -> Report:
    return Report("eggs", "Weight of eggs", ABOUT, "60 g", [report.table(("egg", "g"), [("one", 58)])], {"one": 58})


def test_a_page_states_conditions_explanation_and_figures() -> None:
    page = made().page()
    positions = [
        page.index(text) for text in ("# Weight of eggs", "- command: ", "- date: 2", "- machine: ", "- bound: ")
    ]
    assert positions == sorted(positions)
    assert page.endswith("\n\nThey are weighed.\n\n| egg | g |\n| --- | --- |\n| one | 58 |\n")


def test_nothing_is_written_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made().publish(None)
    made().publish(Directories(tmp_path / "pages", tmp_path / "raw"))
    printed = capsys.readouterr().out
    assert (tmp_path / "pages/eggs.md").read_text() == made().page()
    assert json.loads((tmp_path / "raw/eggs.json").read_text())["figures"] == {"one": 58}
    assert printed.count("# Weight of eggs") == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], None), (["--save"], Directories()), (["--save", "/tmp/a"], Directories.single("/tmp/a"))],
)
def test_figures_go_to_the_tree_or_to_one_directory(arguments: list[str], expected: Directories | None) -> None:
    assert report.parser("Eggs.").parse_args(arguments) == argparse.Namespace(save=expected)


def test_a_ledger_keeps_what_was_done_before_an_interruption(tmp_path: Path) -> None:
    Directories.single(str(tmp_path)).ledger("runs").add({"id": "one"}, {"id": "two"})
    ledger = Ledger(tmp_path / "runs.jsonl")
    assert ledger.has("one")
    assert not ledger.has("three")
    ledger.clear()
    assert Ledger(tmp_path / "runs.jsonl").lines == []
