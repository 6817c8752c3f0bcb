"""Attacks: locking a record before its rank does, and creating files with the names of a rank's record."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testing.programs import Program, start
from testing.records import living_rank, publish
from tests.attacks.job.jobs import attack, process
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope.record import writer
from rankscope_exporter.ranks.run_directory import RunDirectory

LOCK_ALL = """
held = []
for path in Path(sys.argv[1]).iterdir():
    try:
        held.append(os.open(path, os.O_RDONLY))
        fcntl.lockf(held[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        print(error.strerror)
print("tried", flush=True)
sys.stdin.read()
"""
TAKE = """
getattr(Path(sys.argv[1]), sys.argv[2])()
"""


@needs_root
def test_another_user_cannot_lock_a_new_record_before_its_rank(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attackers: list[Program] = []
    lockf: Callable[..., Any] = fcntl.lockf

    def attacked(*arguments: Any) -> Any:
        attackers.append(start(*process(MALLORY, LOCK_ALL, shared)))
        output.extend(iter(attackers[-1].read_line, "tried"))
        return lockf(*arguments)

    output: list[str] = []
    monkeypatch.setattr(writer.fcntl, "lockf", attacked)
    try:
        publish(shared)
    finally:
        for attacker in attackers:
            attacker.communicate()
    assert output == ["Permission denied"]
    assert [path.name for path in shared.iterdir()] == ["r.0.rank"]


@needs_root
@pytest.mark.parametrize("taken", ["r.0.rank", ".r.0.rank"])
@pytest.mark.parametrize("kind", ["touch", "mkdir"])
def test_a_rank_is_shown_although_another_user_has_taken_its_name(shared: Path, taken: str, kind: str) -> None:
    attack(TAKE, shared / taken, kind)
    with living_rank(shared, before=f"become({VICTIM})"):
        ranks = RunDirectory([shared]).scan().ranks
    (name,) = {path.name for path in shared.iterdir()} - {taken}
    assert name.startswith("r.0.")
    assert [(rank.key, rank.owner, rank.snapshot.alive) for rank in ranks] == [(("r", "0", str(VICTIM)), VICTIM, True)]
