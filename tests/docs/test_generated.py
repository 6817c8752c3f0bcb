"""Generated files are up to date, and marked as generated in their text and for GitHub."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from docs import generate as reference
from docs import generate_diagnosis as diagnosis
from docs import generate_texts as texts

import generate as dashboards

ROOT = Path(__file__).parents[2]
GENERATORS = {
    "docs/generate_texts.py": texts,
    "grafana/generate.py": dashboards,
    "docs/generate.py": reference,
    "docs/generate_diagnosis.py": diagnosis,
}
each_generator = pytest.mark.parametrize("name", GENERATORS)
RENDERED = {ROOT / "deploy/kustomize/rankscope.yaml"}  # by helm: tests/deploy/test_helm.py
LOCKED = {ROOT / "exporter/requirements.txt", ROOT / "exporter/requirements-build.txt"}
MEASURED = ROOT / "docs/measurements"


def marked_as_generated() -> set[Path]:
    lines = [line.split() for line in (ROOT / ".gitattributes").read_text().splitlines()]
    found = {line[0]: set(ROOT.glob(line[0])) for line in lines if "linguist-generated" in line}
    assert all(found.values()), "a pattern without a file"
    return set().union(*found.values())


@cache
def generated(name: str) -> dict[Path, str]:
    """Return the files that a generator writes, with their texts."""
    return dict(GENERATORS[name].generated())


@each_generator
def test_generated_files_are_up_to_date(name: str) -> None:
    for path, text in generated(name).items():
        assert path.read_text(encoding="utf-8") == text, f"{path} is old: run `make generate`"


def head_of(path: Path, text: str) -> str:
    """Return the part that names the generator: the first lines, or the description of a dashboard."""
    is_dashboard = path.parent in (dashboards.OUTPUT, dashboards.CHART)
    return str(json.loads(text)["description"]) if is_dashboard else " ".join(text.splitlines()[:3])


@each_generator
def test_generated_files_name_their_generator_and_command(name: str) -> None:
    assert generated(name)
    for path, text in generated(name).items():
        head = head_of(path, text)
        assert name in head, path
        assert "`make generate`" in head, path


@each_generator
def test_make_generate_calls_every_generator(name: str) -> None:
    (recipe,) = (ROOT / "Makefile").read_text().split("\ngenerate:")[1:]
    assert f" {name}" in recipe.partition("\n\n")[0]


def test_the_dashboard_generator_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards, "OUTPUT", tmp_path)
    monkeypatch.setattr(dashboards, "CHART", tmp_path / "chart")
    (tmp_path / "chart").mkdir()
    dashboards.main()
    for folder in (tmp_path, tmp_path / "chart"):
        assert {path.name for path in folder.glob("*.json")} == {
            "fleet.json",
            "cost.json",
            "run.json",
            "node.json",
        }
    assert json.loads((tmp_path / "run.json").read_text())["uid"]


def test_exactly_the_generated_files_are_marked_for_git() -> None:
    measured = {path for path in marked_as_generated() if path.parent == MEASURED}
    assert marked_as_generated() - measured == {*LOCKED, *RENDERED}.union(*map(generated, GENERATORS))
