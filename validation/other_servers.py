"""Compare the notifications that other monitoring servers send: of the demo, and of cases of the gauntlet.

    make other-servers
    python -m validation.other_servers --seed 932 --save

The same faults, rules and configuration, with Debian 12's Prometheus and Alertmanager, with those of Debian's next
release, and with VictoriaMetrics and vmalert of that release. A row has the alert, its place and cause, and the seconds
from the onset to the receiver. It is the same if only the seconds differ.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from testing import report
from testing.report import Line

OTHERS = report.ROOT / ".other-servers/usr/bin"
DATABASES = {"Prometheus": None, "newer Prometheus": "prometheus", "VictoriaMetrics": "victoria-metrics"}
"""The variable DATABASE of testing/servers.py by column; None for what is on the PATH."""
CASES = (
    *("f02_slow_reads", "f03_slow_loader", "f07_memory_held", "f09_rank_zero_works", "f10_throttling", "f14", "f18"),
    *("f19", "f20_idle_gpu", "f22_synchronized_metrics", "g1", "g3", "evaluation", "accumulation"),
)
NOTIFIED = re.compile(r"^\S+  Rankscope(\w+): notified ([\d.]+) s", re.MULTILINE)
PLACE = ("rank", "gpu", "cause")
Answers = Mapping[str, tuple[str, str]]
"""What was notified, and its seconds, by fault."""


def answers(database: str | None, seed: int) -> Answers:
    """Return what these servers notified in the demo and in each case. Raises CalledProcessError."""
    own = {"PATH": f"{OTHERS}:{os.environ['PATH']}", "DATABASE": database} if database else {}
    with tempfile.TemporaryDirectory(prefix="rankscope-servers-") as directory:
        said = _run({**os.environ, **own}, "examples.demo", "--once")
        arguments = ("--seeds", f"{seed}", "--no-pairs", "--save", directory, "--only", *CASES)
        _run({**os.environ, **own}, "validation.gauntlet", *arguments)
        lines = [json.loads(line) for line in (Path(directory) / "gauntlet.jsonl").read_text().splitlines()]
    of_demo = {f"the demo's {name}": (name, seconds) for name, seconds in NOTIFIED.findall(said)}
    return of_demo | {line["case"]: _notified(line) for line in lines}


def _run(environment: Mapping[str, str], module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def _notified(line: Line) -> tuple[str, str]:
    found = [one["labels"] for one in line["verdicts"] if one["fired"]]
    seconds = [f"{one['seconds']:.1f}" for one in line["verdicts"] if one["fired"]]
    texts = [
        " ".join((labels["alertname"].removeprefix("Rankscope"), *(f"{k} {labels[k]}" for k in PLACE if labels.get(k))))
        for labels in (*found, *line["false_alarms"])
    ]
    return "; ".join(texts) or "nothing", ", ".join(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and publish. Return 1 if a notification differs."""
    parser = report.parser(__doc__, prog="make other-servers")
    parser.add_argument("--seed", type=int, default=931)
    options = parser.parse_args(arguments)
    found = {name: answers(database, options.seed) for name, database in DATABASES.items()}
    rows, different = [], 0
    for case in sorted({case for one in found.values() for case in one}):
        said, seconds = zip(*(one.get(case, ("not run", "")) for one in found.values()), strict=True)
        different += len(set(said)) > 1
        rows.append((case, " / ".join(dict.fromkeys(said)), *seconds))
    body = [
        f"{len(rows) - different} of {len(rows)} are the same.",
        report.table(("fault", "notified", *(f"seconds, {name}" for name in found)), rows),
    ]
    page = report.Report("other_servers", "Other monitoring servers", __doc__, "the same notifications", body, found)
    page.publish(options.save)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
