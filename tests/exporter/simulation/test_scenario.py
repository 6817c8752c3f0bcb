"""Scenarios are parsed as documented, and errors name the key."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from rankscope_exporter.documents import DocumentError
from rankscope_exporter.simulation import scenario as scenario_module
from rankscope_exporter.simulation import simulated_uuid
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.models import MODELS, GpuModel
from rankscope_exporter.simulation.scenario import load_scenario, parse_scenario
from rankscope_exporter.simulation.timeline import SimulatedProcess
from rankscope_exporter.simulation.values import ScenarioError, size

GIB = 2**30


def test_a_number_creates_idle_gpus_that_follow_ranks():
    scenario = load_scenario("8")
    assert len(scenario.timelines) == 8
    assert scenario.follow_ranks
    assert scenario.model == GpuModel()
    assert scenario.timelines[7].seconds(100).utilized == 0


def test_the_documented_example_is_valid():
    _, example = scenario_module.__doc__.split("\n\n", 1)
    scenario = parse_scenario(yaml.safe_load(example))
    first, _, third, fourth = scenario.timelines
    assert first.state(29).busy == 0.9
    assert (first.state(30).busy, first.state(30).waiting) == (0, 1)
    assert third.state(15).processes == (SimulatedProcess(4711, 8 * GIB, ("compute", "graphics")),)
    assert third.xids == ((20, 79),)
    assert third.state(45).fails == {"nvmlDeviceGetPowerUsage": 999}
    assert fourth.state(1e6).busy == 0
    assert scenario.processes_dir == Path("/dev/shm/holders")


def test_values_apply_until_a_later_entry_changes_them():
    timeline = parse_scenario(
        {"gpus": 1, "timeline": {0: [{"at": 5, "busy": 0.5, "memory_used": "1 GiB"}, {"at": 10, "busy": 1}]}}
    ).timelines[0]
    assert timeline.state(4.9).busy == 0
    assert timeline.state(10).memory_used == GIB
    assert timeline.seconds(12).computing == pytest.approx(5 * 0.5 + 2)


def test_a_model_is_named_and_can_be_modified():
    assert parse_scenario({"gpus": 1, "model": "T4"}).model == MODELS["T4"]
    split = parse_scenario({"gpus": 1, "model": {"like": "A100", "mig": ["1g.5gb"], "power_max": 300}}).model
    assert (split.name, split.mig, split.power_max) == (MODELS["A100"].name, ("1g.5gb",), 300)


def test_a_lost_gpu_does_no_work():
    entries = [{"at": 0, "busy": 1}, {"at": 2, "lost": True}, {"at": 6, "lost": False}]
    timeline = parse_scenario({"gpus": 1, "timeline": {0: entries}}).timelines[0]
    assert timeline.seconds(8).computing == pytest.approx(4)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("[]", "the scenario: expected keys and values"),
        ("{}", "gpus: missing"),
        ("gpus: 0", "gpus: 0 is not between 1 and 64"),
        ("gpus: four", "gpus: expected a whole number, not 'four'"),
        ("gpus: true", "gpus: expected a whole number, not True"),
        ("{gpus: 1, gpu: 2}", "unknown key 'gpu'"),
        ("{gpus: 1, follow_ranks: 1}", "follow_ranks: expected true or false"),
        ("{gpus: 1, processes_dir: 3}", "processes_dir: expected text"),
        ("{gpus: 1, model: {memory: 80 GB}}", "model.memory: '80 GB' is not a size"),
        ("{gpus: 1, model: {power_idle: .nan}}", "model.power_idle: expected a number"),
        ("{gpus: 1, model: T5}", "model: unknown 'T5'; known: H100, A100, T4, B200"),
        ("{gpus: 1, model: {like: [T4]}}", "model: expected text"),
        ("{gpus: 1, model: {like: A100, mig: [half]}}", "model.mig: 'half' is not a MIG profile"),
        ("{gpus: 1, timeline: {0: [{at: 0, ecc: {dram: 1}}]}}", "timeline.0[0].ecc: unknown key 'dram'"),
        ("{gpus: 1, timeline: {0: [{at: 0, fields: {82: hot}}]}}", "timeline.0[0].fields.82: expected a whole number"),
        ("{gpus: 1, driver: [{at: 0, loaded: yes please}]}", "driver[0].loaded: expected true or false"),
        ("{gpus: 1, timeline: {1: []}}", "timeline.1: no such GPU among 1"),
        ("{gpus: 1, timeline: {0: {at: 0}}}", "timeline.0: expected a list"),
        ("{gpus: 1, timeline: {0: [{busy: 1}]}}", "timeline.0[0].at: expected a number"),
        ("{gpus: 1, timeline: {0: [{at: 5}, {at: 4}]}}", "timeline.0[1].at: 4 is before the previous entry (5)"),
        ("{gpus: 1, timeline: {0: [{at: 0, bussy: 1}]}}", "timeline.0[0]: unknown key 'bussy'"),
        ("{gpus: 1, timeline: {0: [{at: 0, busy: 1.5}]}}", "timeline.0[0].busy: 1.5 is not between 0 and 1"),
        ("{gpus: 1, timeline: {0: [{at: 0, throttle: [hot]}]}}", "timeline.0[0].throttle: unknown 'hot'"),
        ("{gpus: 1, timeline: {0: [{at: 0, processes: [{pid: -1}]}]}}", "timeline.0[0].processes[0].pid: -1"),
        ("{gpus: 1, timeline: {0: [{at: 0, fails: {nvmlPower: 1}}]}}", "timeline.0[0].fails: unknown key 'nvmlPower'"),
        (
            "{gpus: 1, timeline: {0: [{at: 0, fails: {nvmlDeviceGetPowerUsage: BROKEN}}]}}",
            "timeline.0[0].fails.nvmlDeviceGetPowerUsage: expected a whole number, not 'BROKEN'",
        ),
    ],
)
def test_an_error_is_one_line_with_the_key(document, expected, tmp_path):
    path = tmp_path / "scenario.yml"
    path.write_text(document)
    with pytest.raises(DocumentError) as caught:
        load_scenario(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert "\n" not in message


def test_invalid_yaml_is_one_line_too(tmp_path):
    path = tmp_path / "scenario.yml"
    path.write_text("gpus: [1\nmodel: }")
    with pytest.raises(DocumentError, match="not YAML") as caught:
        load_scenario(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(DocumentError, match=r"nowhere\.yml: No such file"):
        load_scenario("nowhere.yml")


def test_too_many_gpus_are_rejected():
    with pytest.raises(ScenarioError, match="65 is not between 1 and 64"):
        load_scenario("65")


@pytest.mark.parametrize(
    ("text", "expected"), [(7, 7), ("512 B", 512), ("20GiB", 20 * GIB), ("1.5 KiB", 1536), ("0 MiB", 0)]
)
def test_sizes_are_in_bytes(text, expected):
    assert size("memory", text) == expected


def test_simulated_uuid_imports_nothing_heavy():
    script = """
        import sys
        from rankscope_exporter.simulation import simulated_uuid
        assert simulated_uuid(3) == "GPU-51300000-0000-4000-8000-000000000003"
        print({"pynvml", "yaml", "prometheus_client"} & set(sys.modules))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "set()\n"
    assert len({simulated_uuid(index) for index in range(64)}) == 64


def test_gpus_of_different_machines_have_different_uuids():
    assert SimulatedDriver(parse_scenario({"gpus": 1})).gpus[0].uuid == simulated_uuid(0)
    assert SimulatedDriver(parse_scenario({"gpus": 1, "machine": 1})).gpus[0].uuid == simulated_uuid(0, machine=1)
    assert simulated_uuid(0, machine=1) != simulated_uuid(0)


def test_gpu_counters_continue_when_the_machines_clock_is_set(monkeypatch):
    driver = SimulatedDriver(parse_scenario({"gpus": 1}))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= driver.now() < 60
