"""Shared code of the fuzzers: a saved report continues where it ended, and another seed starts a new one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from validation.fuzz import fuzzing


def calls_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[tuple[int, int, int]]:
    """Return seed, first number and count of each call of the fuzzer of `eggs`."""
    calls: list[tuple[int, int, int]] = []

    def fuzz(seed: int, first: int, count: int) -> Counter[str]:
        calls.append((seed, first, count))
        return Counter(broken=count)

    monkeypatch.setattr(sys, "argv", ["fuzz_eggs", *arguments])
    fuzzing.main("Eggs.", "eggs", fuzz, "fuzz_eggs", "none")
    return calls


def report(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((path / "fuzz_eggs.json").read_text())["figures"]
    return {name: made[name] for name in made if name != "seconds"}


def test_a_report_continues_where_it_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--eggs", "30", "--save", str(tmp_path))
    assert calls_of(monkeypatch, *arguments) == [(1, 0, 30)]
    assert calls_of(monkeypatch, *arguments) == [(1, 30, 30)]
    assert report(tmp_path) == {"seed": 1, "inputs": 60, "outcome": {"broken": 60}}
    assert calls_of(monkeypatch, *arguments, "--seed", "2") == [(2, 0, 30)]
    assert report(tmp_path) == {"seed": 2, "inputs": 30, "outcome": {"broken": 30}}


def test_a_failure_is_reproduced_by_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert calls_of(monkeypatch, "--eggs", "30", "--save", str(tmp_path)) == [(1, 0, 30)]
    assert calls_of(monkeypatch, "--first", "7", "--eggs", "1", "--save", str(tmp_path)) == [(1, 7, 1)]
