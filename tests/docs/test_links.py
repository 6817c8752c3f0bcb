"""Links between pages and to headings resolve; source files that a page names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
REPLACED = re.compile(r"^Replaced by \[decision", re.MULTILINE)
NOT_HISTORY = [page for page in PAGES if page.name != "CHANGELOG.md" and not REPLACED.search(page.read_text())]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
SOURCE = re.compile(r"`([\w-]+(?:/[\w-]+)*\.(?:py|sh|c|h))`")
FOLDERS = (
    "benchmarks",
    "deploy",
    "docs",
    "examples",
    "exporter",
    "grafana",
    "nvml_simulator",
    "testing",
    "tests",
    "trainer_hooks",
    "validation",
)
SOURCES = {f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from headings: lower case, hyphens for blanks, only word characters."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    }


def broken(page: Path) -> list[str]:
    found = []
    for path, anchor in LINK.findall(CODE.sub("", page.read_text())):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{path}#{anchor}" if anchor else path)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_page_resolves(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", NOT_HISTORY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    named = set(SOURCE.findall(page.read_text()))
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in SOURCES)} == set()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `title`, here\n[a](#a-title-here) [b](page.md) [c](none.md) [d](#none) `[e](code.md)`\n")
    assert broken(page) == ["none.md", "#none"]
