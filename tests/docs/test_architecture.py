"""docs/architecture.md names every room and only what there is, and who imports whom is as it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = {"rankscope": ROOT / "trainer_hooks/rankscope", "rankscope_exporter": ROOT / "exporter/rankscope_exporter"}
ROOMS = [
    (package, str(path.parent.relative_to(root)))
    for package, root in PACKAGES.items()
    for path in sorted(root.rglob("__init__.py"))
    if path.parent != root
]
NAMED = sorted(set(re.findall(r"`((?:[\w-]+/)+(?:[\w.-]+\.\w+)?)`", PAGE)))
FOLDERS = ("", "trainer_hooks/rankscope/", "exporter/rankscope_exporter/")
IMPORTS = {
    room: set(re.findall(r"`([\w/]+)`", others))
    for room, others in re.findall(r"^\| `(rankscope\w*/\w+)` \|(.*)\|$", PAGE, re.MULTILINE)
}


def section_of(package: str) -> str:
    """What the page says of a package's rooms."""
    folder = str(PACKAGES[package].relative_to(ROOT))
    return PAGE.partition(f"### `{folder}/`")[2].partition("\n#")[0]


def room_of(module: str) -> str | None:
    """The room that a module is in, as the page's table of imports names it; None if it is in none."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    return (
        f"{package}/{first}" if package in PACKAGES and (PACKAGES[package] / first / "__init__.py").exists() else None
    )


def imported_by(room: str) -> set[str]:
    package, name = room.split("/")
    found = {room}
    for path in (PACKAGES[package] / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {room_of(alias.name) or room for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {room_of(f"{node.module}.{alias.name}") or room for alias in node.names}
    return found - {room}


@pytest.mark.parametrize(("package", "room"), ROOMS)
def test_every_room_is_described(package: str, room: str) -> None:
    assert f"| `{room}/` | " in section_of(package)


@pytest.mark.parametrize("name", NAMED)
def test_every_file_and_folder_that_is_named_exists(name: str) -> None:
    assert any((ROOT / folder / name).exists() for folder in FOLDERS)


def test_every_room_has_a_line_in_the_table_of_imports() -> None:
    assert set(IMPORTS) == {f"{package}/{room}" for package, room in ROOMS if "/" not in room}


@pytest.mark.parametrize("room", IMPORTS)
def test_a_room_imports_no_other_than_the_page_says(room: str) -> None:
    assert imported_by(room) <= IMPORTS[room]
