"""Attack: records of ever new users (a range of subordinate ids), to overload the directory service with lookups."""

from __future__ import annotations

from pathlib import Path

from tests.attacks.ranks.ranks_support import clock, ended, owned
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.gpu.allocation.processes import LOOKUPS_AT_ONCE, UserNames
from rankscope_exporter.ranks.run_directory import RankPolicy, RunDirectory

pytestmark = needs_root
POLLS, NEW_USERS = 5, 100


def test_ever_new_users_cause_few_lookups_and_hide_no_name(run_dir: Path) -> None:
    looked_up: list[int] = []
    users = UserNames(lambda uid: looked_up.append(uid) or f"user{uid}")
    directory = RunDirectory([run_dir], clock, policy=RankPolicy(users.name))
    ended(run_dir, VICTIM, "mine")
    for poll in range(POLLS):
        first = MALLORY + NEW_USERS * poll
        forged = [ended(run_dir, uid, f"forged{uid}") for uid in range(first, first + NEW_USERS)] if poll else []
        scan = directory.scan()
        assert len(scan.ranks) == 1 + len(forged)
        users.resolve()
        for path in forged:
            path.unlink()
    assert len(looked_up) <= LOOKUPS_AT_ONCE + POLLS
    (mine,) = owned(directory.scan(), VICTIM)
    assert mine.user == f"user{VICTIM}"
