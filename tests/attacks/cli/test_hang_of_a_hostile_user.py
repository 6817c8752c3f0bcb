"""The attack: another user's records have the name of a run, so that `rankscope hang` blames one of their ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from testing.records import living_rank
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope.record import layout
from rankscope_exporter.hangs.command import show

pytestmark = needs_root
WAITING = {"collective_op": layout.OPS.index("all_reduce") + 1.0, "group_collectives": 5.0}
BEHIND = {"group_collectives": 4.0}


def test_only_the_callers_own_ranks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        living_rank(tmp_path, "forged", BEHIND, run="r", rank="1", groups=["0-1"]),
        living_rank(tmp_path, "r.0", BEHIND, run="r", rank="0", groups=["0-1"]),
        living_rank(tmp_path, "r.1", WAITING, run="r", rank="1", groups=["0-1"]),
    ):
        os.chown(next(tmp_path.glob("forged*")), MALLORY, MALLORY)
        assert show(None, "r", [tmp_path]) == 0
    assert capsys.readouterr().out.startswith("Rank 0 of 2 blocks the other ranks.")


def test_a_caller_without_ranks_is_asked_to_be_one_of_the_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        living_rank(tmp_path, "r.0", WAITING, run="r", rank="0", groups=["0-1"]),
        living_rank(tmp_path, "r.1", BEHIND, run="r", rank="1", groups=["0-1"]),
    ):
        for name, owner in (("r.0", VICTIM), ("r.1", MALLORY)):
            os.chown(next(tmp_path.glob(f"{name}*")), owner, owner)
        assert show(None, "r", [tmp_path]) == 2
    assert "several users have a run r" in capsys.readouterr().err
