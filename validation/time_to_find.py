"""Measure the time until a fault is found on its node and notified, live and as shipped.

    python -m validation.time_to_find --save
    python -m validation.time_to_find --device asynchronous --save

Faults of the gauntlet that slow down steps (1.4 times as long), and a hang, are injected into a real job of four ranks.
Exporter, Prometheus, Alertmanager and thresholds are real and as shipped; one Prometheus scrapes every 5 s, another
every 15 s. Seconds are from the onset to the first `/api/v1/runs` with the right finding, and to the notification at
the receiver. The GPUs and the device's time are simulated.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from deploy.prometheus import shipped
from testing import report
from testing.job.device import ASYNCHRONOUS, GLOO
from testing.job.launch import RANKS
from testing.report import table
from testing.stack import Stack, wait_for
from testing.statistics import percentile
from validation.gauntlet import shadow
from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target
from validation.gauntlet.cases import all_cases
from validation.gauntlet.score import judge

FAULTS = {
    GLOO: ("f02", "f03", "f04", "f09", "f10_throttling", "f11", "f12", "f13", "f14", "f15", "f21", "f22", "f17"),
    ASYNCHRONOUS: ("f02", "f03", "f04", "f09", "f14", "f15", "f22", "f25", "f26", "f18"),
}
"""Prefixes of cases. One hang only: it sets the run's pace for an hour."""
HANGS = ("f17", "f18")
TRAINS_FOR = 630.0  # seconds before the first fault: then the run has a pace and a baseline
CALM_FOR, CALM_WITHIN = 30.0, 240.0  # seconds without any finding or alert between two faults
FOUND_WITHIN = 150.0
BRISK = "5s"
READY = f"count(rankscope_rank_up == 1) == {RANKS}"


def _brisk_config(exporters: Sequence[str], alertmanager: str | None = None) -> str:
    config = shipped.prometheus_document(exporters, alertmanager)
    config["global"] |= {"scrape_interval": BRISK, "evaluation_interval": BRISK}
    config["rule_files"] = [str(shipped.HERE / f"rules/{BRISK}.yml")]
    return yaml.safe_dump(config, sort_keys=False)


SPEEDS = {
    "15s": shipped,
    BRISK: SimpleNamespace(alertmanager_config=shipped.alertmanager_config, prometheus_config=_brisk_config),
}


class MonitoredArena(Arena):
    """A node that is monitored at both speeds, with the thresholds of production."""

    def __init__(self, directory: Path, memory: Path, device: str) -> None:
        super().__init__(directory, memory, device, thresholds=None)
        self.stacks = {name: self._stack(directory / name, name) for name in SPEEDS}
        self.stack = self.stacks[BRISK]

    def _stack(self, directory: Path, name: str) -> Stack:
        directory.mkdir()
        return Stack(directory, [], speed=SPEEDS[name], targets=[self.exporter.address])

    def _start(self, started: ExitStack) -> None:
        self.exporter.start()
        started.callback(self.exporter.stop)
        for stack in self.stacks.values():
            started.enter_context(stack)
        super()._start(started)

    def findings(self) -> Iterator[dict[str, str]]:
        """Yield the labels of the exporter's current findings."""
        with urllib.request.urlopen(f"{self.exporter.url}/api/v1/runs", timeout=5) as answer:
            runs = json.load(answer)["runs"]
        for run in runs:
            for one in run["findings"]:
                place = {name: str(one[name]) for name in ("rank", "gpu", "node") if one[name] not in (None, "")}
                yield {**place, **{name: one[name] for name in ("kind", "cause", "severity")}, "run": run["run"]}

    def become_calm(self) -> bool:
        """Wait until there was no finding and no alert for a while. Return whether that happened."""
        since, until = time.monotonic(), time.monotonic() + CALM_WITHIN
        while time.monotonic() < until:
            alerts = [stack.prometheus.query("ALERTS") for stack in self.stacks.values()]
            if any(alerts) or any(True for _ in self.findings()) or not self.stack.prometheus.query(READY):
                since = time.monotonic()
            if time.monotonic() - since > CALM_FOR:
                return True
            time.sleep(1.0)
        return False


def measure(arena: MonitoredArena, name: str, case: Case, target: Target) -> dict[str, Any]:
    """Inject a fault. Return the seconds until it is found and notified, None for what did not happen."""
    is_calm = arena.become_calm()
    first = {speed: len(stack.webhook.notifications) for speed, stack in arena.stacks.items()}
    time.sleep(random.uniform(0.0, 15.0))
    case.inject(arena, target)
    onset, seen = arena.onset, list[tuple[dict[str, str], float]]()
    notified: dict[str, float | None] = dict.fromkeys(SPEEDS)

    def has_come() -> bool:
        known = [labels for labels, _ in seen]
        seen.extend((labels, time.time()) for labels in arena.findings() if labels not in known)
        for speed, stack in arena.stacks.items():
            notified[speed] = judge(case, target, onset, stack.webhook.notifications[first[speed] :]).seconds
        return all(notified.values()) and shadow.scored(seen, [(case, target)], onset)["verdicts"][0]["fired"]

    wait_for(has_come, onset + FOUND_WITHIN - time.time())
    scored = shadow.scored(seen, [(case, target)], onset)
    arena.heal()
    verdict = scored["verdicts"][0]
    return {"case": name, "is_calm": is_calm, "found": verdict, **notified, "false_alarms": scored["false_alarms"]}


def body(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return medians and high quantiles, and a row for each fault."""
    slow = [line for line in lines if not line["case"].startswith(HANGS)]
    hangs = [line for line in lines if line["case"].startswith(HANGS)]
    rows = [_summary("faults that slow steps", slow), _summary("hangs", hangs)]
    every = [(line["case"], *_seconds(line), _right(line), len(line["false_alarms"])) for line in lines]
    columns = ("", "found: median", "P90", "5 s: median", "P90", "15 s: median", "P90")
    return [table(columns, rows), table(("fault", "found", "5 s", "15 s", "place and cause", "false alarms"), every)]


def _seconds(line: dict[str, Any]) -> tuple[float | str, ...]:
    return tuple(
        "none" if one is None else round(one, 1) for one in (line["found"]["seconds"], line[BRISK], line["15s"])
    )


def _right(line: dict[str, Any]) -> str:
    return "right" if line["found"]["place_right"] and line["found"]["cause_right"] else "WRONG"


def _summary(name: str, lines: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    columns = [[value for line in lines if isinstance(value := _seconds(line)[i], float)] for i in range(3)]
    return name, *(round(percentile(one, p), 1) if one else "" for one in columns for p in (0.5, 0.9))


@contextmanager
def _monitored(device: str) -> Iterator[MonitoredArena]:
    prefix = "rankscope-find-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as directory,
        tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as memory,
        MonitoredArena(Path(directory), Path(memory), device) as arena,
    ):
        yield arena


def main() -> int:
    """Measure, print and publish. Return 1 if a fault is not found, or found wrongly."""
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=FAULTS, default=GLOO)
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--seed", type=int, default=101)
    options = parser.parse_args()
    wanted = tuple(options.only or FAULTS[options.device])
    named = [
        (name, case) for name, case in all_cases().items() if name.startswith(wanted) and options.device in case.devices
    ]
    random.seed(options.seed)
    lines = []
    with _monitored(options.device) as arena:
        time.sleep(TRAINS_FOR)
        for name, case in random.sample(named, len(named)):
            lines.append(measure(arena, name, case, Target(rank=random.randrange(1, 4))))
            print(lines[-1], file=sys.stderr, flush=True)
    name = "time_to_find" if options.device == GLOO else "time_to_find_asynchronous"
    bound = (
        "found: median 10 s, P90 15 s on the host, 15 and 25 s on the device, a hang 60 s; notified: P90 35 and 75 s"
    )
    report.Report(name, "Time to find a fault", __doc__, bound, body(lines), lines).publish(options.save)
    return 0 if all(_right(line) == "right" for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
