"""promtool's tests of the rules, from Python."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.prometheus.shipped import RULES

from testing import servers

INTERVAL = 15
"""Seconds between two samples and evaluations, as in the shipped prometheus.yml."""


def complaint(test: Mapping[str, Any], path: Path, rules: Path | None = RULES) -> str:
    """Return promtool's failures of a test, or ''. The test is written to `path`."""
    document = {"rule_files": [str(rules)] if rules else [], "evaluation_interval": f"{INTERVAL}s", "tests": [test]}
    path.write_text(json.dumps(document))
    command = [servers.program("promtool"), "test", "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else re.sub(r"\n{2,}", "\n", done.stdout + done.stderr)


def series(metric: str, values: str, **labels: str) -> dict[str, str]:
    """Return a series in promtool's notation, such as `1+2x3 _x2 stale`."""
    return {"series": f"{metric}{braces(labels)}", "values": values}


def braces(labels: Mapping[str, str]) -> str:
    """Return a selector of these labels."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
