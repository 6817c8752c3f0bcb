"""A simulated machine under the real pynvml, with a clock that tests advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from testing.clock import Clock
from testing.waiting import eventually

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.scenario import parse_scenario

START = 1_800_000_000.0


class Machine:
    """An installed simulated machine, its clock, and a driver that connects to it."""

    def __init__(self, scenario: str, **options: Any) -> None:
        self.clock = Clock(START)
        options.setdefault("sleep", self.clock.advance)
        options.setdefault("clock", self.clock)
        self.simulated = SimulatedDriver(parse_scenario(yaml.safe_load(scenario)), **options)
        self.driver = Driver()

    def advance(self, seconds: float, condition: Callable[[], object]) -> None:
        """Advance the clock, and wait until the condition holds."""
        self.clock.advance(seconds)
        eventually(condition)

    def device(self, index: int = 0) -> Device:
        assert self.driver.connect()
        return self.driver.device(index)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def machine() -> Iterator[Callable[..., Machine]]:
    """Yield a function that makes a machine from a scenario's YAML. Each is removed when the test ends."""
    with ExitStack() as installations:

        def make(scenario: str, **options: Any) -> Machine:
            made = Machine(scenario, **options)
            installations.enter_context(installed(made.simulated))
            installations.callback(made.driver.close)
            return made

        yield make
