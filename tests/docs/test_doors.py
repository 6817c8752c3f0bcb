"""A file that is added and not registered does nothing, and nothing else would say so: CONTRIBUTING.md's doors."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rankscope import probes
from rankscope_exporter.gpu.allocation.holder import SOURCES
from rankscope_exporter.registry import COLLECTORS, RANK_METRICS

ROOT = Path(__file__).parents[2]
EXPORTER = ROOT / "exporter/rankscope_exporter"


def files(folder: Path) -> set[str]:
    """The modules in it, by name."""
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


ALLOCATION = sorted(files(EXPORTER / "gpu/allocation"))


def test_every_collector_s_file_is_a_collector() -> None:
    of_files = files(EXPORTER / "gpu/collectors") | files(EXPORTER / "ranks/collectors")
    assert of_files | {"exporter"} == {collector.name for collector in COLLECTORS}


@pytest.mark.parametrize("name", sorted(files(EXPORTER / "ranks/metrics")))
def test_every_metric_of_a_rank_is_listed(name: str) -> None:
    declared = importlib.import_module(f"rankscope_exporter.ranks.metrics.{name}").METRICS
    assert {metric.name for metric in declared} <= {metric.name for metric in RANK_METRICS}


def test_every_scheduler_that_is_asked_for_holders_is_a_source_of_them() -> None:
    """Else the first GPU that it names fails the collector `allocation`."""
    modules = [importlib.import_module(f"rankscope_exporter.gpu.allocation.{name}") for name in ALLOCATION]
    classes = [one for module in modules for one in vars(module).values() if hasattr(one, "holders")]
    names = {one.name for one in classes if isinstance(getattr(one, "name", None), str)}
    assert {"slurm", "kubernetes"} <= names <= set(SOURCES)


def test_every_probe_is_installed() -> None:
    folder = ROOT / "trainer_hooks/rankscope/probes"
    can_be = {name for name in files(folder) if "\ndef install(" in (folder / f"{name}.py").read_text()}
    assert can_be == {*probes.all_probes(), *probes.late_probes()}


def test_every_page_of_a_decision_has_a_number_of_its_own() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
