"""The documentation site: it builds without a warning, its links resolve, and its commands and figures are right."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from docs import site_pages

from rankscope.cli import launch
from rankscope_exporter import config, registry
from rankscope_exporter.diagnosis.words import PORT_FAULTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = re.compile(r"(?:https?:)?//|mailto:")


class Document(HTMLParser):
    """One page: its anchors, its links, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = {""}, set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.add(found.get("id", ""))
        (self.links if tag == "a" else self.loads).update(found[name] for name in ("href", "src") if name in found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[Path, Document]:
    return {path: Document(path.read_text()) for path in site.rglob("*.html")}


def test_every_link_on_the_site_resolves(site: Path, documents: dict[Path, Document]) -> None:
    broken = []
    for path, document in documents.items():
        for link in document.links | document.loads:
            url, anchor = urldefrag(unquote(link))
            if url.startswith(site_pages.REPOSITORY):
                is_there = (ROOT / url.removeprefix(site_pages.REPOSITORY)).exists()
            elif ELSEWHERE.match(url):
                continue
            else:
                target = (site / url[1:] if url.startswith("/") else path.parent / url if url else path).resolve()
                target = target / "index.html" if target.is_dir() else target
                is_there = target.exists() and (not anchor or anchor in documents[target].anchors)
            if not is_there:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_the_site_makes_no_request_to_another_host(site: Path, documents: dict[Path, Document]) -> None:
    assert not [load for document in documents.values() for load in document.loads if ELSEWHERE.match(load)]
    for path in documents:
        # What makes the theme's script ask api.github.com and unpkg.com.
        assert not re.search(r'data-md-component="?source|class="?mermaid', path.read_text()), path
    assert not [
        path for path in site.rglob("*.css") if re.search(r"(?:url\(|@import)['\" ]*(?:https?:)?//", path.read_text())
    ]


def test_no_list_or_table_is_shown_as_text(documents: dict[Path, Document]) -> None:
    assert not [
        path for path in documents if re.search(r"<p>(?:(?!</p>).)*\n(?:[-*] |\d+\. |\|)", path.read_text(), re.DOTALL)
    ]


def test_every_finding_has_a_page_with_its_runbooks_and_its_picture_if_there_is_one(site: Path) -> None:
    assert site_pages.DATA["findings"].keys() <= site_pages.modules().keys()
    for kind in site_pages.modules():
        text = (site / "findings" / kind / "index.html").read_text()
        assert bool(re.search(r"<svg[^>]*figure", text)) == (kind in site_pages.DATA["findings"])
        main = text.partition("<article")[2]
        assert all(f"runbooks/{alert}/" in main for alert in site_pages.alerts().get(kind, ()))


def test_drawings_are_inline_and_recorded_pictures_keep_their_own_colors(site: Path) -> None:
    assert re.findall(r'<img[^>]*src="([^"]+)"', (site / "index.html").read_text()) == [
        "pictures/top.svg",
        "pictures/notification.svg",
        "pictures/rankscope-run.png",
    ]
    assert "<style>" in (site / "pictures/top.svg").read_text()
    assert 'aria-label="' in (site / "concepts/index.html").read_text()


@pytest.mark.parametrize("kind", site_pages.DATA["findings"])
def test_the_evidence_on_a_page_is_what_the_detector_yields(kind: str) -> None:
    source = inspect.getsource(site_pages.modules()[kind])
    for name in site_pages.DATA["findings"][kind].get("evidence", ()):
        assert f'"{name}"' in source or name in PORT_FAULTS
        assert name in site_pages.DATA["evidence"]


def commands(page: str) -> list[list[str]]:
    """Return the words of each command on a page, without the variables before it."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    lines = [part for block in blocks for line in block.splitlines() for part in line.split("&&")]
    return [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line.strip()).split(maxsplit=1) for line in lines]


@pytest.mark.parametrize("page", ["quick-start.md", "sizing.md"])
def test_every_command_on_a_page_exists(page: str) -> None:
    for program, *rest in commands(page):
        arguments = shlex.split(" ".join(rest))
        if program == "rankscope":
            launch.make_parser().parse_args(arguments)
        elif program == "rankscope-exporter":
            config.make_parser(registry.HELP, registry.OFF_BY_DEFAULT).parse_args(arguments)
        elif program == "make":
            assert f"\n{arguments[0]}: " in (ROOT / "Makefile").read_text()
        elif program == "pip":
            extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
            assert set(extras) >= set(re.findall(r"\w+", arguments[1]))
        else:
            assert program in {"cd", "curl", "git", "torchrun"}


def test_the_figures_on_the_page_about_sizing_are_those_of_the_pages_that_it_links_to() -> None:
    rows = re.findall(r"^(\|.*\]\(([\w/]+\.md)\).*)$", (DOCS / "sizing.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for row, page in rows:
        known = set(re.findall(r"\d+(?:\.\d+)?", (DOCS / page).read_text()))
        assert set(re.findall(r"\d+(?:\.\d+)?", row.replace("P99", ""))) <= known, row
