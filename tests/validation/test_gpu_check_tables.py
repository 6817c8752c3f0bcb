"""gpu-check's tables name metrics, labels and label values as the exporter serves them."""

from __future__ import annotations

import pytest
from docs.generate import Clock
from validation.gpu_check.effects import EFFECTS, Effect, judge_effects
from validation.gpu_check.exporter import Scrape
from validation.gpu_check.table import ROWS, WORDS, Row, Word

from rankscope_exporter.gpu.collector import Gpu, Tick
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.registry import GPU_COLLECTORS
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.scenario import parse_scenario

UUID = "GPU-1"
# But for what is not served before 4 GiB, which no simulated GPU has sent after a second.
SERVED = [row for row in (*ROWS, *EFFECTS) if row.metric != "pcie_bytes_total"]


@pytest.fixture(scope="module")
def served() -> list[Scrape]:
    """What simulated GPUs of three generations show."""
    return [scrape(model) for model in ("H100", "A100", "T4")]


def scrape(model: str) -> Scrape:
    simulated = SimulatedDriver(parse_scenario({"gpus": 1, "model": model}), clock=Clock())
    with installed(simulated):
        driver = Driver()
        driver.connect()
        device = driver.device(0)
        readers = {collector: collector.reader() for collector in GPU_COLLECTORS}
        rounds = [{s: read(device, Tick(simulated.now(), 1.0)) for s, read in readers.items()} for _ in range(3)]
        driver.close()
    families = (family for s in GPU_COLLECTORS for family in s.families({Gpu(0, UUID): rounds[-1][s]}))
    samples = (sample for family in families for sample in family.samples)
    return Scrape(0.0, {(s.name, frozenset(s.labels.items())): s.value for s in samples})


@pytest.mark.parametrize("row", SERVED, ids=lambda row: f"{row.metric} {' '.join(row.labels.values())}")
def test_a_row_s_series_are_served(served: list[Scrape], row: Row | Effect) -> None:
    assert any(s.select(f"rankscope_gpu_{row.metric}", uuid=UUID, **row.labels) for s in served)


@pytest.mark.parametrize("row", WORDS, ids=lambda row: f"{row.metric} {row.label}")
def test_a_word_s_label_is_served(served: list[Scrape], row: Word) -> None:
    assert any(row.label in dict(labels) for s in served for _, labels in s.select(f"rankscope_gpu_{row.metric}"))


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: f"{effect.phase} {effect.metric}")
def test_a_gpu_that_does_what_the_load_does_passes(effect: Effect) -> None:
    done = {"began": 100.0, "ended": 120.0, "wall_seconds": 20.0, "busy_seconds": 15.0, "bytes": 2.0**32}
    growth = float(done[effect.known]) * (effect.least + effect.most) / 2
    scrapes = [counted(99.5, effect, 7.0), counted(122.5, effect, 7.0 + growth)]
    verdicts = {check.about: check.outcome for check in judge_effects({effect.phase: done}, scrapes, UUID)}
    assert verdicts[f"{effect.phase}: {' '.join([effect.metric, *effect.labels.values()])}"] == "ok"


def counted(at: float, effect: Effect, count: float) -> Scrape:
    labels = frozenset({("uuid", UUID), *effect.labels.items()})
    return Scrape(at, {(f"rankscope_gpu_{effect.metric}", labels): count})
