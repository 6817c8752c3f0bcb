"""Renders the rules: rules/source/*.yml with the values of thresholds.yml, for both speeds.

    python deploy/prometheus/render.py            writes rules/production/ and rules/fast/
    python deploy/prometheus/render.py --check    writes nothing, exits 1 if a file is not up to date

The rendered files are committed, so that Prometheus needs nothing but them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
SPEEDS = ("production", "fast")
PLACEHOLDER = re.compile(r"<<\s*(?P<name>\w+)\s*(?:\|\s*(?P<form>\w+)\s*)?>>")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Thresholds = Mapping[str, Mapping[str, Any]]


class RenderError(Exception):
    """The sources or the thresholds are wrong; the text names the place."""


def load_thresholds(path: Path) -> Thresholds:
    """The thresholds by name: production and fast value, and the reason for them."""
    thresholds: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())
    for name, fields in thresholds.items():
        if set(fields) != {*SPEEDS, "reason"}:
            raise RenderError(f"{path.name}: {name} needs exactly production, fast and reason, has {sorted(fields)}")
    return thresholds


def seconds(duration: str) -> str:
    """A duration such as `90s` or `5m` as a number of seconds; raises ValueError if it is none."""
    match = re.fullmatch(r"(\d+)(ms|s|m|h|d)", duration)
    if match is None:
        raise ValueError(f"{duration} is no duration such as 90s or 5m")
    return f"{int(match[1]) * SECONDS[match[2]]:g}"


def percent(ratio: str) -> str:
    """A ratio such as `0.1` as a percentage."""
    return f"{float(ratio) * 100:g}%"


FORMS: dict[str | None, Callable[[str], str]] = {None: str, "seconds": seconds, "percent": percent}


def render(source: str, thresholds: Thresholds, speed: str, where: str) -> str:
    """`source` with its placeholders filled in. `where` stands in errors, before the line's number."""
    lines = source.splitlines(keepends=True)
    return "".join(_render_line(line, thresholds, speed, f"{where}:{n}") for n, line in enumerate(lines, start=1))


def _render_line(line: str, thresholds: Thresholds, speed: str, where: str) -> str:
    def value(match: re.Match[str]) -> str:
        name, form = match["name"], match["form"]
        if name not in thresholds:
            raise RenderError(f"{where}: unknown threshold <<{name}>>")
        if form not in FORMS:
            raise RenderError(f"{where}: unknown form <<{name} | {form}>>")
        try:
            return FORMS[form](str(thresholds[name][speed]))
        except ValueError as error:
            raise RenderError(f"{where}: <<{name} | {form}>>: {error}") from None

    return PLACEHOLDER.sub(value, line)


def render_all(root: Path = HERE) -> dict[Path, str]:
    """What each rendered file has to contain. Raises RenderError, for a threshold that nobody uses too."""
    thresholds = load_thresholds(root / "thresholds.yml")
    sources = {path: path.read_text() for path in sorted((root / "rules/source").glob("*.yml"))}
    used = {match["name"] for text in sources.values() for match in PLACEHOLDER.finditer(text)}
    rendered = {
        root / "rules" / speed / path.name: _header(path, speed) + render(text, thresholds, speed, path.name)
        for speed in SPEEDS
        for path, text in sources.items()
    }
    for name in thresholds.keys() - used:
        raise RenderError(f"thresholds.yml: no rule uses {name}")
    return rendered


def _header(source: Path, speed: str) -> str:
    return f"# {speed} speed; made by render.py from ../source/{source.name} and ../../thresholds.yml: edit those.\n\n"


def outdated(rendered: Mapping[Path, str]) -> Iterator[Path]:
    """The files that differ from what they should be, are missing, or are left from a source that is gone."""
    for path, text in rendered.items():
        if not path.exists() or path.read_text() != text:
            yield path
    for directory in {path.parent for path in rendered}:
        yield from (path for path in sorted(directory.glob("*.yml")) if path not in rendered)


def write(rendered: Mapping[Path, str]) -> None:
    """Bring every outdated file up to date."""
    for path in list(outdated(rendered)):
        if path in rendered:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(rendered[path])
        else:
            path.unlink()


def main() -> int:
    """Render, or check; 1 if a checked file is not up to date, 2 if the sources are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, name what is not up to date")
    options = parser.parse_args()
    try:
        rendered = render_all()
    except RenderError as error:
        sys.stderr.write(f"render.py: {error}\n")
        return 2
    if not options.check:
        write(rendered)
    stale = list(outdated(rendered))
    for path in stale:
        sys.stderr.write(f"render.py: {path.relative_to(HERE)} is not up to date\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
