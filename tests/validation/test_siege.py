"""Each attack of the siege on the run directory happens and leaves nothing behind, and the checks find violations.

A siege fails if one of its attacks did nothing. What those on the port do to a server: tests/attacks/http.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.ranks.ranks_support import living
from tests.attacks.users import needs_root
from validation.siege import attack, records
from validation.siege.figures import Phase, blocks, difference
from validation.siege.report import PHASES, QUIET, SIEGE, Observed, body, checks, is_about_victim
from validation.siege.scraper import Scraped, victims
from validation.siege.target import RUN, VICTIM, Seen, Target

from rankscope.record.group_name import members
from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.ledger.owner_files import DIRECTORY_LIMIT
from rankscope_exporter.ranks.checks import check_info
from rankscope_exporter.ranks.parallelism import coordinates


@pytest.fixture
def target(run_dir: Path, tmp_path: Path) -> Target:
    (tmp_path / "closed").mkdir()
    return Target(str(run_dir), str(tmp_path / "closed"), "127.0.0.1", 9, "127.0.0.3")


def seen_of(act: Callable[[Target, Seen], Generator[None]], target: Target, acts: int = 1) -> Seen:
    seen = Seen()
    with closing(act(target, seen)) as attacking:
        for _ in islice(attacking, acts):
            pass
    return seen


def written_by(act: Callable[[Target, Seen], Generator[None]], target: Target) -> list[RankSnapshot]:
    """Return the records after the first act."""
    with closing(act(target, Seen())) as attacking:
        next(attacking)
        return [read_rank(path) for path in Path(target.run_dir).iterdir()]


class TestOnTheDirectory:
    @pytest.mark.parametrize(
        ("act", "word"),
        [
            (records.flooded, "made"),
            (records.crowded, "published"),
            (records.many_children, "children"),
            (records.forged_living, "forged updates"),
            (records.forged_dead, "crashed"),
            (records.forged_uuids, "claimed"),
            (records.large_groups, "groups named"),
            (records.broken, "truncated"),
            (records.long_names, "runs"),
            (records.many_users, "updates of all users"),
            (records.costly_runs, "updates of all runs"),
        ],
    )
    def test_the_attack_happens_and_leaves_nothing_behind(
        self, target: Target, act: Callable[[Target, Seen], Generator[None]], word: str
    ) -> None:
        assert seen_of(act, target, acts=3)[word] >= 3
        assert not list(Path(target.run_dir).iterdir())

    def test_the_forged_ranks_claim_to_be_the_victims(self, target: Target) -> None:
        found = {rank.info["rank"]: rank for rank in written_by(records.forged_living, target)}
        assert {"0", "1", "999"} <= set(found)
        assert {rank.info["run"] for rank in found.values()} == {RUN}
        assert found["2"]["started_unix"] > time.time() + 3600

    def test_the_exporter_accepts_the_large_groups(self, target: Target) -> None:
        found = written_by(records.large_groups, target)
        for snapshot in found:
            check_info(snapshot)
            assert "pp" in coordinates(snapshot)
        sizes = [len(members(name)) for snapshot in found for name in snapshot.groups]
        assert len(sizes) == 64 * 16
        assert min(sizes) > 40_000

    @needs_root
    def test_a_record_of_a_live_rank_cannot_be_locked(self, target: Target) -> None:
        with living(Path(target.run_dir), VICTIM, RUN):
            assert seen_of(records.read_locks, target) == {"refused: EAGAIN": 2}

    def test_the_closed_directory_can_be_listed_but_not_entered(self, target: Target) -> None:
        assert seen_of(records.closed_directory, target) == {"mode 744": 1}


def test_an_attacker_ends_on_sigterm_and_reports_its_acts(target: Target) -> None:
    arguments = [
        sys.executable,
        "-m",
        "validation.siege.attack",
        attack.BURN,
        json.dumps({**asdict(target), "share": 0.1}),
    ]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        report = json.loads(process.communicate()[0])
    assert process.returncode == 0
    assert report["seen"]["slices"] >= 1
    assert report["cpu"] > 0


class TestFigures:
    def test_steps_are_grouped_by_five_seconds_within_the_phase(self) -> None:
        steps = [(100.01, 0.05), (101.0, 0.1), (102.0, 0.3), (103.0, 0.2), (106.0, 0.4), (110.0, 0.9)]
        assert blocks(Phase(QUIET, 0, 100.0, 110.0), steps) == [0.2, 0.4]

    def test_a_difference_is_within_rounds_and_ignores_a_machine_that_slows_down(self) -> None:
        before, after = [[1.0, 1.0], [2.0, 2.0]], [[1.5, 1.5], [2.5, 2.5]]
        assert difference(before, after) == (500, 500, 500)

    def test_an_interval_contains_its_estimate(self) -> None:
        middle, low, high = difference([[1.0, 2.0, 3.0, 4.0]], [[2.0, 3.0, 4.0, 5.0]])
        assert low <= middle == 1000 <= high
        assert low < high


def observed(**others: object) -> Observed:
    phases = [Phase(name, 0, 1000.0 + 10 * n, 1010.0 + 10 * n) for n, name in enumerate(PHASES)]
    steps = [(1000 + tenth / 10, 0.05) for tenth in range(500)]
    scrapes = [Scraped(1000 + half / 2, 0.01, "", ("0", "1"), 1000) for half in range(100)]
    made: dict[str, Any] = {
        "phases": phases,
        "steps": steps,
        "scrapes": scrapes,
        "missed": {"0": 0, "1": 0},
        "peak": 100_000_000,
    }
    attackers = [("silent connections", {"cpu": 1.0, "seconds": 10.0, "seen": {"opened": 1}})]
    made |= {"load": [1.0], "attackers": attackers, "saved": [(1000, True)], **others}
    return Observed(1.0, 1, "1", **made)


def failing(seen: Observed) -> list[str]:
    assert body(seen)
    return [check.found for check in checks(seen) if not check.holds]


class TestSummary:
    def test_all_checks_hold_without_a_violation(self) -> None:
        assert failing(observed()) == []

    @pytest.mark.parametrize("saved", [(DIRECTORY_LIMIT + 1, True), (1000, False)])
    def test_a_large_state_directory_and_one_without_the_victims_state_are_found(self, saved: tuple[int, bool]) -> None:
        (found,) = failing(observed(saved=[(1000, True), saved]))
        assert "the victim's" in found

    @pytest.mark.parametrize("at", [1015.2, 1025.2])
    def test_a_failed_scrape_counts_as_infinitely_late(self, at: float) -> None:
        (found,) = failing(observed(scrapes=[*observed().scrapes, Scraped(at, 0.001, "503")]))
        assert found.startswith("no page")

    def test_one_page_without_one_rank_is_a_violation(self) -> None:
        (found,) = failing(observed(scrapes=[*observed().scrapes, Scraped(1001.0, 0.001, "", ("0",))]))
        assert found.startswith("1 of the scraper's 101")
        (found,) = failing(observed(missed={"0": 0, "1": 2}))
        assert found.endswith("2 of Prometheus's")

    @pytest.mark.parametrize("began", [1010, 1020])
    def test_steps_longer_than_the_control_explains_are_a_violation(self, began: float) -> None:
        steps = [(end, 0.06 if began <= end < began + 10 else 0.05) for end, _ in observed().steps]
        (found,) = failing(observed(steps=steps))
        assert found.startswith("+10.00 [")

    def test_alerts_about_the_attackers_own_forgeries_are_not_false(self) -> None:
        alert = {"alertname": "RankscopeRankCrashed", "run": RUN, "owner": "61002"}
        assert failing(observed(alerts=[{"labels": alert, "since": 1.0, "phase": SIEGE}])) == []
        alert = {**alert, "owner": str(VICTIM)}
        assert failing(observed(alerts=[{"labels": alert, "since": 1.0, "phase": SIEGE}])) == [
            "1 x RankscopeRankCrashed (siege)"
        ]

    def test_too_much_memory_and_a_missing_attack_are_violations(self) -> None:
        idle = ("read locks", {"cpu": 0.0, "seconds": 0.0, "seen": {}})
        assert failing(observed(peak=151_000_000, attackers=[*observed().attackers, idle])) == [
            "151.0 MB maximum",
            "read locks",
        ]


def test_an_alert_without_an_owner_is_about_the_victim_if_it_names_its_run() -> None:
    assert is_about_victim({"alertname": "RankscopeGpuAllocatedIdle", "run": RUN})
    assert is_about_victim({"alertname": "RankscopeExporterDown"})
    assert not is_about_victim({"alertname": "RankscopeGpuUnused"})
    assert not is_about_victim({"alertname": "RankscopeRanksHidden", "owner": "61002", "run": RUN})


def test_only_live_ranks_of_the_victims_run_and_user_count() -> None:
    lines = [
        'rankscope_rank_up{run="victim",rank="0",owner="61001"} 1.0',
        'rankscope_rank_up{run="victim",rank="1",owner="61001"} 0.0',
        'rankscope_rank_up{run="victim",rank="1",owner="61002"} 1.0',
        'rankscope_rank_up{run="vic\\"tim",rank="1",owner="61001"} 1.0',
    ]
    assert victims("\n".join(lines)) == ("0",)
