"""The known load keeps count of what it does, and its effects are judged by that."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from validation.gpu_check.effects import EFFECTS, judge_effects
from validation.gpu_check.exporter import Scrape
from validation.gpu_check.instead import judge_rules
from validation.gpu_check.load import PHASES, Gpu, Load, Phase, Sizes, attempt
from validation.gpu_check.loaded import LOAD, LoadProcess

UUID = "GPU-1"


class FakeGpu:
    """Work takes 1/128 s (a number without rounding) on the device and as long on the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.makers = {"bf16": lambda: print, "upload": lambda: print}
        self.flops = {"bf16": 1000}
        self.bytes = {"upload": 64, "hold": 4096}

    def timed(self, _work: object, times: int) -> float:
        self.now += times / 128
        return times / 128

    def hold(self, seconds: float, sleep: Callable[[float], None]) -> None:
        sleep(seconds)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def load() -> Load:
    gpu = FakeGpu()
    made = Load(gpu, gpu.clock, gpu.sleep)  # type: ignore[arg-type]  # has all of Gpu that Load uses
    for work in gpu.makers:
        made.warm_up(work)
    return made


def test_a_phase_of_half_the_time_is_busy_for_half_of_it(load: Load) -> None:
    done = load.run(Phase("half", "bf16", 2.0, on=0.125, off=0.125))
    assert done["busy_seconds"] == 1.0
    assert done["ended"] - done["began"] == 1.875  # the last pause belongs to nobody
    assert done["flops"] == 128 * 1000


def test_a_full_phase_has_no_pause(load: Load) -> None:
    done = load.run(Phase("full", "bf16", 2.0))
    assert done["busy_seconds"] == done["ended"] - done["began"] == 2.0


def test_a_phase_without_a_length_does_its_work_once(load: Load) -> None:
    assert load.run(Phase("once", "upload", 0, on=0))["bytes"] == 64


def test_holding_memory_and_doing_nothing_are_not_busy(load: Load) -> None:
    assert load.run(Phase("hold", "hold", 4, on=4))["bytes"] == 4096
    assert load.run(Phase("idle", "idle", 4, on=4))["busy_seconds"] == 0


def test_every_effect_is_of_a_phase_that_the_load_has() -> None:
    assert {effect.phase for effect in EFFECTS} <= {phase.name for phase in PHASES}


def test_every_work_runs_on_the_cpu_too() -> None:
    gpu = Gpu(torch, "cpu", Sizes(matrix=8, chunk=1024, held=1024))
    assert {phase.work for phase in PHASES} <= gpu.makers.keys() | {"hold", "idle"}
    assert all(gpu.timed(make(), 2) > 0 for make in gpu.makers.values())
    slept: list[float] = []
    gpu.hold(1.5, slept.append)
    assert slept == [1.5]


def test_the_load_tells_when_each_phase_began_and_what_it_did() -> None:
    small = ["--device=cpu", "--matrix=8", "--chunk=1024", "--held=1024", "--scale=0.002"]
    ran = subprocess.run([sys.executable, str(LOAD), *small], check=True, stdout=subprocess.PIPE, text=True)
    told = [json.loads(line) for line in ran.stdout.splitlines()]
    assert told[0]["uuid"] == ""
    assert [line["phase"] for line in told[1:]] == [phase.name for phase in PHASES for _ in range(2)]
    assert [line["bytes"] for line in told if line.get("phase") == "upload once" and "bytes" in line] == [1024]


def test_a_work_that_cannot_be_done_costs_itself_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(what: str) -> None:
        raise MemoryError(f"no more {what}")

    attempt("upload", fail, "of it")
    assert json.loads(capsys.readouterr().out) == {"failed": "upload", "error": "MemoryError: no more of it"}


def test_what_a_library_prints_is_not_what_the_load_tells() -> None:
    lines = ["a warning", '{"phase": "bf16", "began": 1.0}', '{"phase": "bf16", "began": 1.0, "ended": 2.0}']
    command = [sys.executable, "-c", f"print('\\n'.join({lines}))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        told = LoadProcess(process)
        process.wait()
        while not told.ended:
            time.sleep(0.01)
    assert told.began("bf16") == 1.0
    assert told.phases().keys() == {"bf16"}


def busy(at: float, seconds: float) -> Scrape:
    labels = frozenset({("gpu", "0"), ("uuid", UUID)})
    return Scrape(at, {("rankscope_gpu_busy_seconds_total", labels): seconds})


def outcomes(done: dict[str, Any], *scrapes: Scrape) -> dict[str, str]:
    return {check.about: check.outcome for check in judge_effects({"bf16": done}, scrapes, UUID)}


def test_a_counter_that_grew_by_what_the_load_did_is_ok_wherever_scrapes_lie() -> None:
    done = {"began": 100.0, "ended": 120.0, "busy_seconds": 19.9, "wall_seconds": 20.0}
    found = outcomes(done, busy(90, 0), busy(99.5, 7), busy(121, 26), busy(122.5, 27), busy(130, 50))
    assert found["bf16: busy_seconds_total"] == "ok"
    assert found["bf16: sm_active_seconds_total"] == "absent on both sides"
    assert found["fp32: busy_seconds_total"] == "failed"


def test_a_counter_that_grew_by_less_differs() -> None:
    done = {"began": 100.0, "ended": 120.0, "busy_seconds": 19.9, "wall_seconds": 20.0}
    assert outcomes(done, busy(99.5, 7), busy(122.5, 20))["bf16: busy_seconds_total"] == "differs"


def test_a_rule_that_one_series_breaks_names_it() -> None:
    labels = frozenset({("collector", "xid")})
    scrapes = [Scrape(at, {("rankscope_exporter_collector_success", labels): 1.0 - at}) for at in (0.0, 1.0)]
    broken = [check for check in judge_rules(scrapes) if check.outcome == "differs"]
    assert [check.about for check in broken] == ["rankscope_exporter_collector_success {'collector': 'xid'}"]
