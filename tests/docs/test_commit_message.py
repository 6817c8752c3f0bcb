"""The git hook that checks a commit's subject."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / ".githooks/commit-msg"


@pytest.mark.parametrize(("subject", "is_accepted"), [("é" * 72, True), ("x" * 73, False)])
def test_a_subject_has_at_most_72_characters(subject: str, is_accepted: bool, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\n{'a longer body ' * 10}\n")
    assert (subprocess.run([HOOK, message], check=False).returncode == 0) is is_accepted
