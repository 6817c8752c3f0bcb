"""gpu-check's facts, costs and report, on the simulated driver."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from validation.gpu_check import report
from validation.gpu_check.calls import CALLS, calls
from validation.gpu_check.cost import differences
from validation.gpu_check.exporter import STARTED
from validation.gpu_check.facts import FACTS, facts
from validation.gpu_check.report import Check, judge
from validation.gpu_check.run import attempt
from validation.gpu_check.wrap import judge_wrap

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.registry import GPU_COLLECTORS
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.scenario import parse_scenario


@pytest.fixture(params=["H100", "T4"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    scenario = {"gpus": 1, "model": request.param, "timeline": {0: [{"at": 0, "busy": 0.5}]}}
    with installed(SimulatedDriver(parse_scenario(scenario))):
        driver = Driver()
        assert driver.connect()
        yield driver.device(0)
        driver.close()


def test_every_fact_is_told_whatever_the_device_lacks(device: Device) -> None:
    found = list(facts(device))
    assert not [check for check in found if check.outcome == "failed"]
    assert len(found) > len(FACTS)
    rings = next(check for check in found if check.about == "ring GPU_UTILIZATION")
    assert "µs apart" in rings.ours
    assert next(check for check in found if check.about.startswith("cursor")).ours.startswith("strict")


def test_every_call_and_every_source_has_its_cost(device: Device) -> None:
    found = list(calls(device))
    assert not [check for check in found if check.outcome == "failed"]
    assert len(found) == len(CALLS) + len(GPU_COLLECTORS)


def test_a_part_that_fails_keeps_what_it_found_before() -> None:
    def part() -> Iterator[Check]:
        yield Check("part", "first", "ok")
        raise OSError("no such thing")

    found = attempt("part", part, 10)
    assert [(check.about, check.outcome) for check in found] == [("first", "ok"), ("this part", "failed")]
    assert found[1].note == "OSError: no such thing"


def test_a_part_that_hangs_is_ended_and_still_judges_what_it_has() -> None:
    def part() -> Iterator[Check]:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
            STARTED.append(process)
            yield Check("part", "before", "ok")
            process.wait()
        yield Check("part", "after", "ok")

    assert [check.about for check in attempt("part", part, 0.5)] == ["before", "after", "this part"]


def test_a_part_without_time_is_not_begun() -> None:
    def part() -> Iterator[Check]:
        raise AssertionError

    assert [check.note for check in attempt("part", part, 0)] == ["there was no time left for it"]


@pytest.mark.parametrize(
    ("ours", "theirs", "slack", "outcome"),
    [
        ([1, 3], 2, 0, "ok"),
        ([1, 3], 3.5, 0.5, "ok"),
        ([1, 3], 4, 0.5, "differs"),
        ([1], None, 0, "only we"),
        ([], 1, 0, "only nvidia-smi"),
        ([], None, 0, "absent on both sides"),
    ],
)
def test_a_value_is_judged_by_what_it_was_meanwhile(
    ours: list[float], theirs: float | None, slack: float, outcome: str
) -> None:
    assert judge("part", "value", ours, theirs, slack).outcome == outcome


def test_the_report_puts_first_what_wants_to_be_looked_at(tmp_path: Path) -> None:
    checks = [Check("part", "fine", "ok", "1", "1"), Check("part", "a|b", "differs", "1", "2", "why")]
    report.keep(tmp_path / "report.json", {"GPU": "H200"}, checks)
    page = (tmp_path / "report.md").read_text()
    assert "1 differs, 1 ok" in page
    assert page.index("| a\\|b | differs | 1 | 2 | why |") < page.index("| fine | ok | 1 | 1 |  |")
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["conditions"] == {"GPU": "H200"}
    assert kept["checks"][1]["about"] == "a|b"


def uploaded(**done: Any) -> dict[str, Any]:
    return {"upload": {"began": 10.0, "ended": 12.0, "bytes": 2.0**33, **done}}


def test_a_counter_of_32_bits_is_found_out() -> None:
    seen = {"receive": [(9.5, 2.0**31), (11.0, 5.0), (14.0, 2.0**30)]}
    size, grown = judge_wrap(uploaded(), seen)
    assert size.note == "it wraps"
    assert grown.outcome == "differs"


def test_a_wider_counter_grows_by_what_was_uploaded() -> None:
    seen = {"receive": [(9.5, 2.0**31), (14.0, 2.0**31 + 2.0**33)]}
    size, grown = judge_wrap(uploaded(), seen)
    assert size.note == "it has more than 32 bits"
    assert grown.outcome == "ok"


def test_what_an_unprivileged_exporter_lacks_is_named_by_metric() -> None:
    root = [("a", frozenset({("xid", str(xid))})) for xid in range(3)] + [("b", frozenset())]
    found = list(differences(root, [("b", frozenset())]))
    assert (found[0].about, found[0].outcome) == ("a", "differs")
    assert found[-1].ours == "1, 1 series"
