"""Reports of measurements: a Markdown page in docs/measurements, and raw figures in a directory that git ignores."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Line = dict[str, Any]


@dataclass(frozen=True)
class Directories:
    """The directories for a program's page and for its raw figures."""

    pages: Path = ROOT / "docs/measurements"
    raw: Path = ROOT / "build/measurements"

    @classmethod
    def single(cls, path: str) -> Directories:
        """Return one directory for both."""
        return cls(Path(path), Path(path))

    def ledger(self, name: str) -> Ledger:
        return Ledger(self.raw / f"{name}.jsonl")


def parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser with `--save`. Without it a program prints its report, and replaces no published page."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )
    text = "write the page to docs/measurements and the figures to build/measurements, or both to DIR"
    made.add_argument("--save", type=Directories.single, nargs="?", const=Directories(), metavar="DIR", help=text)
    return made


def command() -> str:
    """Return the command line of this program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


@dataclass(frozen=True)
class Report:
    """A page and its figures; `name` is that of their files."""

    name: str
    title: str
    about: str | None
    """The description of the measurement; of a docstring the first line and the command are left out."""
    bound: str
    body: Sequence[str]
    """Paragraphs and tables."""
    figures: Any
    packages: Sequence[str] = ()
    """Distributions whose versions matter."""

    def conditions(self) -> dict[str, str]:
        """Return the command, date and machine of the measurement, and the bound."""
        versions = [f"Python {platform.python_version()}", *map(installed, self.packages)]
        machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end, {', '.join(versions)}"
        return {"command": f"`{command()}`", "date": f"{date.today()}", "machine": machine, "bound": self.bound}

    def page(self) -> str:
        conditions = "\n".join(f"- {name}: {value}" for name, value in self.conditions().items())
        return "\n\n".join([f"# {self.title}", conditions, explanation(self.about), *self.body]) + "\n"

    def publish(self, directories: Directories | None) -> None:
        """Print the page, and write it with the figures if there are directories for them."""
        print(self.page())
        if directories:
            self.write(directories)

    def write(self, directories: Directories) -> None:
        for directory in (directories.pages, directories.raw):
            directory.mkdir(parents=True, exist_ok=True)
        content = {**self.conditions(), "figures": self.figures}
        (directories.raw / f"{self.name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        (directories.pages / f"{self.name}.md").write_text(self.page())


def installed(distribution: str) -> str:
    """Return the distribution's name and version."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"no {distribution}"


def explanation(text: str | None) -> str:
    """Return a docstring without its first paragraph, if that is one line, and without commands."""
    first, *others = (text or "").strip().split("\n\n")
    others = [part for part in others if not part.startswith("    ")]
    return "\n\n".join(others if others and "\n" not in first else [first, *others])


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows))


@dataclass(frozen=True)
class Check:
    """One line of a verdict."""

    check: str
    holds: bool
    found: str


def verdict(checks: Iterable[Check]) -> str:
    """Return the checks as a table."""
    return table(("check", "holds", "found"), [(one.check, yes_or_no(one.holds), one.found) for one in checks])


def yes_or_no(holds: bool) -> str:
    """Return the word, with a failure in bold."""
    return "yes" if holds else "**NO**"


def text(interval: Sequence[float] | None, digits: int = 1) -> str:
    """Return an estimate with the ends of its interval; `too few` for none."""
    if interval is None:
        return "too few"
    middle, low, high = (f"{value:+.{digits}f}" for value in interval)
    return f"{middle} [{low}, {high}]"


class Ledger:
    """A file with a line of JSON for each run. Several threads may append; an interrupted program resumes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def clear(self) -> None:
        """Delete all lines."""
        self.lines.clear()
        self._path.unlink(missing_ok=True)

    def has(self, run_id: str) -> bool:
        return any(line["id"] == run_id for line in self.lines)

    def observe(self, kind: str, **values: Any) -> None:
        """Append an observation, with the time."""
        self.add({"kind": kind, "time": round(time.time(), 3), **values})

    def add(self, *lines: Line) -> None:
        """Append lines at once."""
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.lines += lines
            with self._path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
