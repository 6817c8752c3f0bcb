"""docs/architecture.md describes every package and names only files that exist; imports follow its table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
TOP_PACKAGES = {
    "rankscope": ROOT / "trainer_hooks/rankscope",
    "rankscope_exporter": ROOT / "exporter/rankscope_exporter",
}
PACKAGES = [
    (top, str(path.parent.relative_to(root)))
    for top, root in TOP_PACKAGES.items()
    for path in sorted(root.rglob("__init__.py"))
    if path.parent != root
]
NAMED = sorted(set(re.findall(r"`((?:[\w-]+/)+(?:[\w.-]+\.\w+)?)`", PAGE)))
FOLDERS = ("", "trainer_hooks/rankscope/", "exporter/rankscope_exporter/")
IMPORTS = {
    package: set(re.findall(r"`([\w/]+)`", others))
    for package, others in re.findall(r"^\| `(rankscope\w*/\w+)` \|(.*)\|$", PAGE, re.MULTILINE)
}


def section_of(top: str) -> str:
    """Return the section of the page about a top package."""
    folder = str(TOP_PACKAGES[top].relative_to(ROOT))
    return PAGE.partition(f"### `{folder}/`")[2].partition("\n#")[0]


def package_of(module: str) -> str | None:
    """Return the package of a module, as the page's table of imports names it; None if it is in none."""
    top, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return f"{top}/{first}" if top in TOP_PACKAGES and (TOP_PACKAGES[top] / first / "__init__.py").exists() else None


def imported_by(package: str) -> set[str]:
    top, name = package.split("/")
    found = {package}
    for path in (TOP_PACKAGES[top] / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {package_of(alias.name) or package for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {package_of(f"{node.module}.{alias.name}") or package for alias in node.names}
    return found - {package}


@pytest.mark.parametrize(("top", "package"), PACKAGES)
def test_every_package_is_described(top: str, package: str) -> None:
    assert f"| `{package}/` | " in section_of(top)


@pytest.mark.parametrize("name", NAMED)
def test_every_file_and_folder_that_is_named_exists(name: str) -> None:
    assert any((ROOT / folder / name).exists() for folder in FOLDERS)


def test_every_package_has_a_row_in_the_table_of_imports() -> None:
    assert set(IMPORTS) == {f"{top}/{package}" for top, package in PACKAGES if "/" not in package}


@pytest.mark.parametrize("package", IMPORTS)
def test_a_package_imports_only_what_the_page_allows(package: str) -> None:
    assert imported_by(package) <= IMPORTS[package]
