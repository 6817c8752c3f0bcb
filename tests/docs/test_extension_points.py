"""CONTRIBUTING.md's extension points: each path in them exists, and each file of a folder is registered."""

from __future__ import annotations

import importlib
import re
from itertools import chain
from pathlib import Path

import pytest
from testing.ways import WAYS

from rankscope import probes
from rankscope_exporter.gpu.allocation.holder import SOURCES
from rankscope_exporter.registry import COLLECTORS, RANK_METRICS

ROOT = Path(__file__).parents[2]
EXPORTER = ROOT / "exporter/rankscope_exporter"
HOOK = ROOT / "trainer_hooks/rankscope"
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^### (.+)\n+((?:.+\n)+)", PAGE, re.MULTILINE))
PATHS = sorted(set(re.findall(r"`([\w./-]+(?:/|\.(?:py|yml|md|toml)))`", PAGE)))
NOT_WAYS = {"job", "launch", "leftovers", "run"}  # these run the ways and check the result


def files(folder: Path) -> set[str]:
    """Return the names of the modules in the folder."""
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def resolve(path: str) -> list[Path]:
    """Return the existing files or folders for a path, from the top or below a package."""
    return [folder / path for folder in (ROOT, HOOK, EXPORTER) if (folder / path).exists()]


@pytest.mark.parametrize("path", [path for path in PATHS if "NAME" not in path])
def test_every_path_that_the_page_names_exists_once(path: str) -> None:
    assert len(resolve(path)) == 1


@pytest.mark.parametrize("path", [path for path in PATHS if "NAME" in path])
def test_every_alert_has_the_files_that_the_page_names(path: str) -> None:
    (folder,) = resolve(str(Path(path).parent))
    assert list(folder.glob(Path(path).name.replace("NAME", "Rankscope*")))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_numbered_steps_and_names_a_test(recipe: str) -> None:
    steps = re.findall(r"^(\d)\. ", RECIPES[recipe], re.MULTILINE)
    assert steps == [str(number) for number in range(1, len(steps) + 1)] != []
    assert "`tests/" in RECIPES[recipe]


ALLOCATION = sorted(files(EXPORTER / "gpu/allocation"))


def test_every_collector_s_file_is_a_collector() -> None:
    of_files = files(EXPORTER / "gpu/collectors") | files(EXPORTER / "ranks/collectors")
    assert of_files == {collector.name for collector in COLLECTORS}


@pytest.mark.parametrize("name", sorted(files(EXPORTER / "ranks/metrics")))
def test_every_rank_metric_is_registered(name: str) -> None:
    declared = importlib.import_module(f"rankscope_exporter.ranks.metrics.{name}").METRICS
    assert {metric.name for metric in declared} <= {metric.name for metric in RANK_METRICS}


def test_every_allocation_source_is_registered() -> None:
    """Otherwise the first GPU that it names would fail the collector `allocation`."""
    modules = [importlib.import_module(f"rankscope_exporter.gpu.allocation.{name}") for name in ALLOCATION]
    classes = [one for module in modules for one in vars(module).values() if hasattr(one, "holders")]
    names = {one.name for one in classes if isinstance(getattr(one, "name", None), str)}
    assert {"slurm", "kubernetes"} <= names <= set(SOURCES)


def test_every_probe_is_installed() -> None:
    folder = HOOK / "probes"
    can_be = {name for name in files(folder) if "\ndef install(" in (folder / f"{name}.py").read_text()}
    assert can_be == {*probes.all_probes(), *probes.late_probes()}


def test_every_file_with_ways_to_train_is_in_the_table_of_ways() -> None:
    listed = {way.partition(".")[0] for way in chain.from_iterable(ways for _, ways in WAYS.values())}
    assert listed == files(ROOT / "testing/ways") - NOT_WAYS


def test_decisions_are_numbered_without_gaps_or_duplicates() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
