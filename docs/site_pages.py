"""Pages of the documentation site that are made when it is built. `make docs` calls these hooks of mkdocs.

Links to files outside docs/ lead to the repository. An SVG becomes part of its page, and takes the page's colors.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any

import yaml
from docs import generate_diagnosis as diagnosis

import rankscope
from rankscope.cli import launch
from rankscope_exporter import config as exporter_config
from rankscope_exporter import registry
from rankscope_exporter.diagnosis import detectors
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.priority import EXPLAINED_BY
from rankscope_exporter.diagnosis.thresholds import Thresholds, Tier
from rankscope_exporter.diagnosis.words import WORDS, advice, sentence
from rankscope_exporter.report.colors import PHASE_COLORS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/rankscope/rankscope/blob/main/"
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
WIDE = ("index.md", "metrics.md", "comparison.md")
"""Pages without the menu at the left."""
INDEXES = {"decisions": "Decisions", "runbooks": "Runbooks"}
DATA = yaml.safe_load((DOCS / "findings.yml").read_text(encoding="utf-8"))
RULES = ROOT / "deploy/prometheus/rules/rankscope.yml"

RUN = ("llm", "1000")
PLACE = Place(2, "0-3", "node-a", "2", "GPU-2", "mlx5_2")
EXAMPLE = {"age": 18_000.0, "scale": 0.5, "stage": 2.0, "port_rate": 0.5}

CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]*images/[^"]+\.svg)" ?/?>')
STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
LABELS, WIDTH, BAR = 90, 560, 22
"""Pixels of a picture: the column of labels, the longest bar, the height of a row."""


def on_config(config: MkDocsConfig) -> None:
    """Replace `folder/*` in the navigation by the pages of the folder that it does not name."""
    nav: list[Any] = config.nav or []
    config.nav = list(_expand(nav, set(_named(nav))))


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are made from code."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let each link lead to a page of the site or to the repository."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["navigation"]
    return rewrite(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Put each drawing into the page, whose colors it takes."""

    def inline(match: re.Match[str]) -> str:
        svg = DOCS / posixpath.normpath(posixpath.join(page.url, match[2]))
        return STYLE.sub("", svg.read_text(encoding="utf-8")).replace("<svg ", f'<svg aria-label="{match[1]}" ', 1)

    return IMAGE.sub(inline, html)


def rewrite(markdown: str, source: str) -> str:
    """Return a page's text with its links as they are on the site. `source` is the page's path below docs/."""
    here = posixpath.dirname(source)
    folder = ROOT if source in FROM_ROOT.values() else DOCS / here

    def link(match: re.Match[str]) -> str:
        return f"]({_target(folder / match[1], here)}{match[2] or ''})"

    parts = CODE.split(markdown)  # code is every second one
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def _target(path: Path, here: str) -> str:
    name = posixpath.normpath(path.relative_to(ROOT).as_posix())
    page = FROM_ROOT.get(name) or name.removeprefix("docs/")
    if name.startswith("docs/") and (ROOT / name).is_dir():
        page += "/index.md" if page in INDEXES else "/README.md"
    elif page == name or not page.endswith((".md", ".svg", ".png")):
        return REPOSITORY + name
    return posixpath.relpath(page, here)


def _named(nav: Sequence[Any]) -> Iterator[str]:
    for entry in nav:
        children = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [children] if isinstance(children, str) else _named(children)


def _expand(nav: Sequence[Any], named: set[str]) -> Iterator[Any]:
    for entry in nav:
        if isinstance(entry, dict):
            yield {title: [*_expand(one, named)] if isinstance(one, list) else one for title, one in entry.items()}
        elif entry.endswith("/*"):
            folder = PurePosixPath(entry).parent
            known = {path.relative_to(DOCS).as_posix() for path in (DOCS / folder).glob("*.md")} | pages().keys()
            yield from sorted(one for one in known - named if PurePosixPath(one).parent == folder)
        else:
            yield entry


@cache
def pages() -> Mapping[str, str]:
    """Return the pages that are made from code or lie outside docs/, by path."""
    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in FROM_ROOT.items()}
    made |= {f"{folder}/index.md": _index(folder, title) for folder, title in INDEXES.items()}
    made |= {f"findings/{kind}.md": _finding(kind, module) for kind, module in modules().items()}
    made["findings/index.md"] = _findings()
    made["reference/flags.md"] = _flags()
    made["reference/python.md"] = _python()
    return made


def _index(folder: str, title: str) -> str:
    found = {
        path.name: path.read_text(encoding="utf-8").splitlines()[0] for path in sorted((DOCS / folder).glob("*.md"))
    }
    return "\n".join([f"# {title}\n", *(f"- [{first.lstrip('# ')}]({name})" for name, first in found.items())])


@cache
def modules() -> Mapping[str, ModuleType]:
    """Return the detector's module of each kind of finding."""
    found = {detector.kind: module for module in detectors.MODULES for detector in module.DETECTORS}
    return {kind: found[kind] for kind in detectors.KINDS}


@cache
def alerts() -> Mapping[str, Sequence[str]]:
    """Return the alerts about each kind of finding. Those that set a `kind` of their own are about something else."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    found: dict[str, dict[str, None]] = {}
    for rule in (rule for group in groups for rule in group["rules"] if "kind" not in rule.get("labels", {})):
        for kinds in re.findall(r'\brankscope_finding_ratio{kind=~?"([^"]+)"', rule["expr"]):
            for kind in kinds.split("|"):
                found.setdefault(kind, {})[rule["alert"]] = None
    return {kind: list(names) for kind, names in found.items()}


def _findings() -> str:
    rows = [(f"[`{kind}`]({kind}.md)", _example(kind), ", ".join(_runbooks(kind))) for kind in modules()]
    return (
        "# Findings\n\nThe diagnosis looks for these every second. "
        "[Its page](../diagnosis.md) says how long a finding has to last, and which finding hides another one.\n\n"
        + diagnosis.table(("finding", "for example", "alert and runbook"), rows)
    )


def _finding(kind: str, module: ModuleType) -> str:
    data = DATA["findings"].get(kind, {})
    words = WORDS[kind]
    causes = dict.fromkeys(cause for cause in (data.get("cause"), *words["words"], *words["advice"]) if cause) or {
        "": None
    }
    said = [(f"`{cause}`" if cause else "any", _said(kind, cause), _advice(kind, cause)) for cause in causes]
    limits = Thresholds()
    used = {f"`{name}`" for name in re.findall(r"\bthresholds\.(\w+)", inspect.getsource(module))}
    thresholds = [row for row in diagnosis.threshold_rows(limits) if row[0] in used]
    parts = [
        f"# `{kind}`",
        f"> {_example(kind)}",
        *([f"{figure(data['bars'])}\n\n{data['caption']}"] if data else ()),
        f"## Definition\n\n{inspect.getdoc(module)}",
        "## Causes\n\n" + diagnosis.table(("cause", "what the finding says", "what to do first"), said),
    ]
    if evidence := data.get("evidence"):
        rows = [(f"`{name}`", DATA["evidence"][name]) for name in evidence]
        text = (
            "A finding has at most four of these numbers, as `rankscope_finding_evidence` and in the [API](../api.md)."
        )
        parts.append(f"## Evidence\n\n{text}\n\n{diagnosis.table(('name', 'meaning'), rows)}")
    parts.append("## Thresholds")
    if any(one.kind == kind for one in detectors.LOSSES):
        text = (
            "The mean loss has to exceed one of these limits for its time, and not by chance ([how](../diagnosis.md)):"
        )
        parts.append(f"{text}\n\n{diagnosis.table(Tier._fields, limits.tiers)}")
    if thresholds:
        parts.append(diagnosis.table(("threshold", "value", "reason"), thresholds))
    hidden = ", ".join(f"[`{by}`]({by}.md)" for by in EXPLAINED_BY.get(kind, ()))
    alert = f"Alert and runbook: {', '.join(_runbooks(kind)) or 'none'}."
    parts.append("## Alert and runbook\n\n" + alert + (f" No alert while the run has {hidden}." if hidden else ""))
    return "\n\n".join(parts) + "\n"


def _runbooks(kind: str) -> list[str]:
    return [f"[{alert}](../runbooks/{alert}.md)" for alert in alerts().get(kind, ())]


def _candidate(kind: str, cause: str) -> Candidate:
    return Candidate(kind, 0.3, cause, PLACE, EXAMPLE)


def _example(kind: str) -> str:
    return _said(kind, DATA["findings"].get(kind, {}).get("cause") or next(iter(WORDS[kind]["words"]), ""))


def _said(kind: str, cause: str) -> str:
    return sentence(RUN, _candidate(kind, cause))


def _advice(kind: str, cause: str) -> str:
    return advice(_candidate(kind, cause))


def figure(bars: Mapping[str, str]) -> str:
    """Return an SVG of bars. Each is given as `phase length phase length …`; `idle` is an empty box."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for label, bar in bars.items():
        name, *numbers = re.split(r",? (?=\d)", label)
        rows |= {f"{name} {number}".strip(): re.findall(r"(\w+) ([\d.]+)", bar) for number in numbers or [""]}
    rows = dict(sorted(rows.items())) if len(rows) > len(bars) else rows
    scale = WIDTH / max(sum(float(length) for _, length in row) for row in rows.values())
    parts = []
    for number, (label, row) in enumerate(rows.items()):
        top, left = number * (BAR + 6), float(LABELS)
        parts.append(f'<text x="0" y="{top + 16}">{escape(label)}</text>')
        for phase, length in row:
            parts.append(_box(phase, left, top, scale * float(length)))
            left += scale * float(length)
    top, left = len(rows) * (BAR + 6) + 8, LABELS
    for phase in dict.fromkeys(phase for row in rows.values() for phase, _ in row):
        parts.append(f'{_box(phase, left, top, 14, 14)}<text x="{left + 20}" y="{top + 12}">{phase}</text>')
        left += 42 + 7 * len(phase)
    size = f'viewBox="0 0 {LABELS + WIDTH} {top + 20}"'
    return (
        f'<div>\n<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img" {size} '
        f'font-family="sans-serif" font-size="13" fill="currentColor">{"".join(parts)}</svg>\n</div>'
    )


def _box(phase: str, left: float, top: float, width: float, height: float = BAR) -> str:
    color = PHASE_COLORS.get(phase)
    paint = f'fill="{color}"' if color else 'fill="none" stroke="currentColor" stroke-dasharray="3"'
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height:g}" {paint}><title>{phase}</title></rect>'
    )


def _flags() -> str:
    exporter = exporter_config.make_parser(registry.HELP, registry.OFF_BY_DEFAULT)
    commands = re.findall(r"[\w-]+(?:\|[\w-]+)+", _help(launch.make_parser()))[0].split("|")
    parts = ["# Command line", "## rankscope-exporter", _block(_help(exporter))]
    parts += ["## rankscope", _block(_help(launch.make_parser()))]
    for command in commands:
        parts += [f"### rankscope {command}", _block(_help(launch.make_parser(), command))]
    return "\n\n".join(parts) + "\n"


def _help(parser: Any, *arguments: str) -> str:
    os.environ.update({"COLUMNS": "100", "NO_COLOR": "1"})
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        parser.parse_args([*arguments, "--help"])
    return text.getvalue()


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def _python() -> str:
    parts = [
        "# Python",
        "What a training script may call. Each call costs next to nothing in a process without the hook.",
    ]
    for name in rankscope.__all__:
        if callable(call := getattr(rankscope, name)):
            signature = str(inspect.signature(call)).replace("'", "")
            parts.append(f"## rankscope.{name}\n\n{_block(f'rankscope.{name}{signature}')}\n\n{inspect.getdoc(call)}")
    return "\n\n".join(parts) + "\n"
