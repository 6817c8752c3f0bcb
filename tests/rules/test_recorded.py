"""What real runs of the gauntlet left in Prometheus: told at production speed as at the fast one, and nothing else is.

They were recorded over gloo. The same runs are told alike if their phases are a device's and their hosts run ahead.

`make gauntlet GAUNTLET=--record` makes the recordings.
"""

from __future__ import annotations

import re

import pytest
from testing import promtool, replay
from testing.recording import RECORDED, Recording
from testing.replay import AFTERWARDS, FAILED
from tests.rules.alertmanager import Alert, running

RECORDINGS = [Recording.read(path) for path in sorted(RECORDED.glob("*.json"))]


@pytest.fixture(scope="module", params=["host", "device"])
def complaint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """promtool's, which has every alert that fires in any of the replayed runs, by either clock."""
    path = tmp_path_factory.mktemp("promtool") / "test.yml"
    runs = RECORDINGS if request.param == "host" else [replay.by_the_device(recording) for recording in RECORDINGS]
    tests = replay.tests_of(runs)
    return "\n".join(promtool.complaint(test, promtool.PRODUCTION, path) for test in tests)


@pytest.fixture(scope="module")
def fired(complaint: str) -> list[Alert]:
    texts = re.findall(r"{(alertname=[^}]*)} 1E\+00", complaint)
    return [dict(re.findall(r'(\w+)="([^"]*)"', text)) for text in texts]


@pytest.fixture(scope="module")
def told(fired: list[Alert], tmp_path_factory: pytest.TempPathFactory) -> list[Alert]:
    """Those of them that nothing inhibits."""
    with running(tmp_path_factory.mktemp("alertmanager")) as alertmanager:
        alertmanager.fire(*fired)
        return alertmanager.told()


def test_no_recorded_run_is_told_of_before_anything_goes_wrong(fired: list[Alert]) -> None:
    assert [alert for alert in fired if alert["when"] == "before"] == []


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.case)
def test_a_recorded_fault_is_told_with_its_place_and_cause_and_nothing_else_is(
    told: list[Alert], recording: Recording
) -> None:
    of_it = [alert for alert in told if recording.case in (alert.get("run"), alert.get("node"), alert.get("instance"))]
    right = [alert for alert in of_it if recording.expected and recording.expected.items() <= alert.items()]
    assert of_it == right
    assert bool(right) == bool(recording.expected)


@pytest.mark.parametrize("later", range(FAILED + AFTERWARDS))
def test_scrapes_that_fail_end_no_alert_and_change_no_cause(fired: list[Alert], later: int) -> None:
    assert at(fired, str(later)) == at(fired, "-1")


def at(fired: list[Alert], when: str) -> list[list[tuple[str, str]]]:
    """What fired then, without the label that says so."""
    return sorted(sorted({**alert, "when": ""}.items()) for alert in fired if alert["when"] == when)


def test_every_alert_is_of_one_of_the_recorded_runs(fired: list[Alert]) -> None:
    cases = {recording.case for recording in RECORDINGS}
    assert [alert for alert in fired if not cases & set(alert.values())] == []
