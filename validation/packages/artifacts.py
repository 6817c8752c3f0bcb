"""Check the packages without a system: reproducible, clean for linters, and deb and rpm with the same files."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy.packages import build
from testing.report import Check

RPMLINT = build.HERE / "rpmlint.toml"
FORMAT_SPECIFIC = re.compile(r"/usr/share/(zsh/|lintian/|doc/rankscope/changelog)")


def output(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files_of_deb(path: Path) -> set[str]:
    """Return the files and links that the package installs."""
    lines = output("dpkg-deb", "--contents", path).splitlines()
    return {line.split()[5][1:] for line in lines if not line.startswith("d")}


def files_of_rpm(path: Path) -> set[str]:
    """Return the files and links that the package installs."""
    lines = output("rpm", "-qp", "--queryformat", r"[%{FILEMODES:perms} %{FILENAMES}\n]", path).splitlines()
    return {line.split()[1] for line in lines if not line.startswith("d")}


def check(built: Sequence[Path], scratch: Path) -> list[Check]:
    """Check the packages: a deb and an rpm for each architecture."""
    version = built[0].name.split("_")[1].rpartition("-")[0]
    again = build.build(scratch / "again", version, list(build.MACHINES))
    same = [digest(path) == digest(other) for path, other in zip(built, again, strict=True)]
    debs, rpms = built[::2], built[1::2]
    lintian = output("lintian", "--allow-root", *debs).strip()
    rpmlint = output("rpmlint", "--config", RPMLINT, *rpms).strip().splitlines()[-1]
    differing = [
        name
        for deb, rpm in zip(debs, rpms, strict=True)
        for name in sorted(files_of_deb(deb) ^ files_of_rpm(rpm))
        if not FORMAT_SPECIFIC.match(name)
    ]
    sizes = [f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in built]
    return [
        Check("two builds have the same bytes", all(same), f"{sum(same)} of {len(same)}: {', '.join(sizes)}"),
        Check("lintian has no error and no warning", not lintian, lintian or "none"),
        Check("rpmlint has no error and no warning", " 0 errors, 0 warnings" in rpmlint, rpmlint.strip()),
        Check(
            "deb and rpm install the same files",
            not differing,
            ", ".join(differing) or f"{len(files_of_rpm(rpms[0]))} files",
        ),
        *check_rpm(rpms[0], scratch / "root"),
    ]


def check_rpm(package: Path, root: Path) -> list[Check]:
    """Install the rpm into an empty directory without dependencies and scriptlets, and parse these with a shell."""
    root.mkdir()
    installed = output("rpm", "--force-debian", f"--root={root}", "--nodeps", "--noscripts", "--install", package)
    missing = [
        name for name in files_of_rpm(package) if not (root / name[1:]).is_symlink() and not (root / name[1:]).exists()
    ]
    scripts = [output("sh", "-n", path) for path in sorted((build.HERE / "rpm").iterdir())]
    requires = ", ".join(output("rpm", "-qp", "--requires", package).splitlines())
    return [
        Check("rpm installs it into an empty root", not installed and not missing, installed or f"requires {requires}"),
        Check("a shell parses the rpm's scriptlets", not any(scripts), "".join(scripts) or f"{len(scripts)} of them"),
    ]
