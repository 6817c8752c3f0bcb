"""The attacks: a lock on a record before its rank has it, and files of the names that a rank wants."""

from __future__ import annotations

import fcntl
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.job.jobs import ATTACKER, VICTIM, attack, needs_root, process

from rankscope.record import writer
from rankscope.record.writer import RankWriter
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.run_directory import RunDirectory

INFO = {**dict.fromkeys(LABELS, ""), "run": "r", "rank": "0", "pid": "1"}

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
PUBLISH = """
import json
writer = rankscope.record.writer.RankWriter()
writer.publish(Path(sys.argv[1]), "r.0", json.loads(sys.argv[2]))
print(writer.path.name, flush=True)
sys.stdin.read()
"""


@needs_root
def test_another_user_gets_no_lock_between_the_making_of_a_record_and_its_own(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attackers = []
    lockf: Callable[..., Any] = fcntl.lockf

    def attacked(*arguments: Any) -> Any:
        attacker = subprocess.Popen(
            process(ATTACKER, LOCK_ALL, shared), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        attackers.append(attacker)
        assert attacker.stdout is not None
        said.extend(iter(attacker.stdout.readline, "tried\n"))
        return lockf(*arguments)

    said: list[str] = []
    monkeypatch.setattr(writer.fcntl, "lockf", attacked)
    try:
        RankWriter().publish(shared, "r.0", INFO)
    finally:
        for attacker in attackers:
            attacker.communicate()
    assert said == ["Permission denied\n"]
    assert [path.name for path in shared.iterdir()] == ["r.0.rank"]


@needs_root
@pytest.mark.parametrize("taken", ["r.0.rank", ".r.0.rank"])
@pytest.mark.parametrize("kind", ["touch", "mkdir"])
def test_a_rank_whose_name_another_user_has_taken_is_shown_all_the_same(shared: Path, taken: str, kind: str) -> None:
    attack(TAKE, shared / taken, kind)
    hook = "import rankscope.record.writer"
    with subprocess.Popen(
        process(VICTIM, PUBLISH, shared, json.dumps(INFO), imports=hook),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as victim:
        assert victim.stdout is not None
        name = victim.stdout.readline().strip()
        ranks = RunDirectory([shared]).scan().ranks
        victim.communicate()
    assert name.startswith("r.0.")
    assert [(rank.key, rank.owner, rank.snapshot.alive) for rank in ranks] == [(("r", "0", str(VICTIM)), VICTIM, True)]
    assert sorted(path.name for path in shared.iterdir()) == sorted([taken, name])
