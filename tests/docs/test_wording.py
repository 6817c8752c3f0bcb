"""Words that readers stumble over, in all tracked text and in the names of tests and functions."""

from __future__ import annotations

from pathlib import Path

import pytest
from testing import wording


def test_no_tracked_text_has_a_word_of_the_list() -> None:
    assert [finding for path in wording.tracked([]) for finding in wording.check(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        'def told() -> None:\n    """Return nothing."""\n',
        "x = 1  # nobody reads this\n",
        'def first() -> int:\n    """Of all values the first."""\n',
        'def is_first() -> bool:\n    """Whether it is the first."""\n',
        '"""By the device."""\n',
    ],
)
def test_each_kind_of_finding_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(text)
    assert len(list(wording.check(Path("module.py")))) == 1


def test_quoted_words_and_nouns_are_not_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "ROOT", tmp_path)
    text = 'class Steps:\n    """All steps of a run."""\n\n    series = "nobody"\n'
    (tmp_path / "module.py").write_text(text)
    assert list(wording.check(Path("module.py"))) == []
