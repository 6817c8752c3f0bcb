"""Recorded answers of promtool stand only for the same rules and the same test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing import rule_tests

RULES = '{"groups": [{"name": "one", "rules": [{"record": "doubled", "expr": "value * 2"}]}]}'


def holding(expected: int, rules: Path) -> str:
    """Return a test that expects this value of the rule."""
    question = {"expr": "doubled", "eval_time": "1m", "exp_samples": [{"labels": "doubled", "value": expected}]}
    series = [{"series": "value", "values": "3x9"}]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [question]}
    return json.dumps({"rule_files": [str(rules)], "tests": [test]})


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Yield a test that holds and its rules, after promtool's answer has been recorded as another one."""
    monkeypatch.setattr(rule_tests, "RECORDED", tmp_path / "answers.jsonl")
    monkeypatch.setattr(rule_tests, "NEW", tmp_path / "new.jsonl")
    monkeypatch.delenv(rule_tests.RUN_AGAIN, raising=False)
    test, rules = tmp_path / "test.json", tmp_path / "rules.json"
    rules.write_text(RULES)
    test.write_text(holding(6, rules))
    assert rule_tests.answer(test, rules).holds
    (line,) = rule_tests.NEW.read_text().splitlines()
    rule_tests.RECORDED.write_text(json.dumps([json.loads(line)[0], "recorded", True]) + "\n")
    rule_tests._recorded.cache_clear()
    yield test, rules
    rule_tests._recorded.cache_clear()


def test_the_recorded_answer_to_the_same_test_is_used(files: tuple[Path, Path], tmp_path: Path) -> None:
    test, rules = files
    copies = (test.rename(tmp_path / "other.json"), rules)
    assert rule_tests.answer(*copies).output == "recorded"


def test_a_changed_rule_or_test_is_run(files: tuple[Path, Path]) -> None:
    test, rules = files
    rules.write_text(RULES.replace("* 2", "* 3"))
    assert "got:" in rule_tests.answer(test, rules).output
    rules.write_text(RULES)
    test.write_text(holding(7, rules))
    assert not rule_tests.answer(test, rules).holds


def test_every_test_runs_if_that_is_asked_for(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rule_tests.RUN_AGAIN, "again")
    assert rule_tests.answer(*files).output != "recorded"


def test_new_answers_replace_the_recorded_ones(files: tuple[Path, Path]) -> None:
    rule_tests.record()
    assert "SUCCESS" in rule_tests.RECORDED.read_text()
    assert not rule_tests.NEW.exists()
