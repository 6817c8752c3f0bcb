"""Write the dashboards to grafana/dashboards/, or with --check say which are out of date (exit status 1)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rankscope_dashboards.queries import DASHBOARDS

OUTPUT = Path(__file__).parent / "dashboards"


def main(arguments: list[str] | None = None, output: Path = OUTPUT) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args(arguments).check
    wanted = {output / f"{name}.json": dashboard.to_json() for name, dashboard in DASHBOARDS.items()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            sys.stderr.write(f"{path} is out of date: run grafana/generate.py\n")
        else:
            path.write_text(wanted[path], encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
