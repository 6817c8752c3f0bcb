"""Run promtool's rule tests, or read the answers that it gave before to the same rules and the same input.

promtool's answer is a function of its version, the rules and the test. The rules rarely change, and to evaluate them
for all simulated runs takes twenty minutes of CPU time. So answers are recorded: `make rule-tests` runs every test
again and writes them. A test whose rules, input or promtool have changed has no recorded answer, and runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from testing import servers

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests/rules/recorded/answers.jsonl"
NEW = ROOT / "build/answers.jsonl"
RUN_AGAIN = "RANKSCOPE_RULE_TESTS"
"""Environment variable: if it is `again`, no recorded answer is used."""
ENVIRONMENT = {**os.environ, "GOGC": "800"}
"""promtool's environment: without GOGC it spends a quarter of its time in garbage collection."""


class Answer(NamedTuple):
    """promtool's output without empty lines and the path of the test, and whether all expectations hold."""

    output: str
    holds: bool


def answer(test: Path, *rules: Path) -> Answer:
    """Return promtool's answer to a test file, which names these files of rules."""
    key = _key(test, rules)
    may_be_recorded = "PYTEST_CURRENT_TEST" in os.environ and os.environ.get(RUN_AGAIN) != "again"
    found = _recorded().get(key) if may_be_recorded else None
    if found is None:
        found = _run(test)
        NEW.parent.mkdir(exist_ok=True)
        with NEW.open("a") as file:  # a line is one write: other processes append, too
            file.write(json.dumps([key, *found]) + "\n")
    return found


def _key(test: Path, rules: tuple[Path, ...]) -> str:
    text = test.read_bytes()
    for path in rules:
        text = text.replace(str(path).encode(), b"")
    return sha256(b"\0".join([_version(), text, *(path.read_bytes() for path in rules)])).hexdigest()


@cache
def _version() -> bytes:
    return subprocess.run([servers.program("promtool"), "--version"], capture_output=True, check=True).stdout


@cache
def _recorded() -> dict[str, Answer]:
    lines = map(json.loads, RECORDED.read_text().splitlines()) if RECORDED.exists() else ()
    return {key: Answer(*found) for key, *found in lines}


def _run(test: Path) -> Answer:
    command = [servers.program("promtool"), "test", "rules", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    output = re.sub(r"\n{2,}", "\n", done.stdout + done.stderr)
    return Answer(output.replace(str(test), test.name), done.returncode == 0)


def record() -> None:
    """Replace the recorded answers by those that were given since the last call."""
    lines = sorted(set(NEW.read_text().splitlines()))
    RECORDED.write_text("".join(f"{line}\n" for line in lines))
    NEW.unlink()
    print(f"{len(lines)} answers of promtool, in {RECORDED.name}")


if __name__ == "__main__":
    record()
