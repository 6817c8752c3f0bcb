"""Recorded runs of the gauntlet: they alert at production speed as at fast speed, and nothing else does.

They were recorded over gloo. They alert in the same way if their phases are a device's and their hosts run ahead.

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
    """Return promtool's complaint, which has every alert of the replayed runs, by each clock."""
    path = tmp_path_factory.mktemp("promtool") / "test.yml"
    runs = RECORDINGS if request.param == "host" else [replay.with_device_clock(recording) for recording in RECORDINGS]
    tests = replay.tests_of(runs)
    return "\n".join(promtool.complaint(test, promtool.PRODUCTION, path) for test in tests)


@pytest.fixture(scope="module")
def fired(complaint: str) -> list[Alert]:
    texts = re.findall(r"{(alertname=[^}]*)} 1E\+00", complaint)
    return [dict(re.findall(r'(\w+)="([^"]*)"', text)) for text in texts]


@pytest.fixture(scope="module")
def uninhibited(fired: list[Alert], tmp_path_factory: pytest.TempPathFactory) -> list[Alert]:
    """Return the alerts that no other alert inhibits."""
    with running(tmp_path_factory.mktemp("alertmanager")) as alertmanager:
        alertmanager.fire(*fired)
        return alertmanager.uninhibited()


def test_no_recorded_run_alerts_before_its_fault(fired: list[Alert]) -> None:
    assert [alert for alert in fired if alert["when"] == "before"] == []


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.case)
def test_a_recorded_fault_alerts_with_its_place_and_cause_and_nothing_else_does(
    uninhibited: list[Alert], recording: Recording
) -> None:
    names = ("run", "node", "instance")
    of_it = [alert for alert in uninhibited if recording.case in map(alert.get, names)]
    right = [alert for alert in of_it if recording.expected and recording.expected.items() <= alert.items()]
    assert of_it == right
    assert bool(right) == bool(recording.expected)


@pytest.mark.parametrize("later", range(FAILED + AFTERWARDS))
def test_failed_scrapes_end_no_alert_and_change_no_cause(fired: list[Alert], later: int) -> None:
    assert at(fired, str(later)) == at(fired, "-1")


def at(fired: list[Alert], when: str) -> list[list[tuple[str, str]]]:
    """Return the alerts of a time, without its label."""
    return sorted(sorted({**alert, "when": ""}.items()) for alert in fired if alert["when"] == when)


def test_every_alert_is_of_one_of_the_recorded_runs(fired: list[Alert]) -> None:
    cases = {recording.case for recording in RECORDINGS}
    assert [alert for alert in fired if not cases & set(alert.values())] == []
