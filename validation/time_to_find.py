"""Measure the time until a fault is found and notified, on one node or on several, live and as shipped.

    python -m validation.time_to_find --save
    python -m validation.time_to_find --device asynchronous --save
    python -m validation.time_to_find --nodes 2 4 --save

Faults of the gauntlet that slow down steps (1.4 times as long), and a hang, are injected into a real job of four ranks.
Exporters, Prometheus, Alertmanager and thresholds are real and as shipped, without the limit of alerts an hour; one
Prometheus scrapes every 5 s, another every 15 s. With several nodes, each has an exporter and its share of the ranks,
and an analyzer asks them all; the nodes are names, run directories and GPUs on one machine, with one clock. Seconds are
from the onset to the first `/metrics` of the exporter, or of the analyzer, with the right finding, and to the
notification at the receiver. The GPUs and the device's time are simulated.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from deploy.prometheus import shipped
from prometheus_client.parser import text_string_to_metric_families
from testing import report, servers
from testing.exporter_process import metrics
from testing.job.device import ASYNCHRONOUS, GLOO
from testing.job.launch import RANKS
from testing.report import table
from testing.servers import directories
from testing.stack import Stack, wait_for
from testing.statistics import percentile
from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target
from validation.gauntlet.cases import all_cases
from validation.gauntlet.findings import scored
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
INTERVALS = ("15s", BRISK)
BOUND = "found: median 10 s, P90 15 s on the host, 15 and 25 s on the device, a hang 60 s; notified: P90 35 and 75 s"
BOUND_ON_NODES = (
    "found: median 10 s, P90 15 s, a hang 60 s; notified at a scrape interval of 15 s: median 32 s, P90 50 s"
)
DIVISORS = [nodes for nodes in range(1, RANKS + 1) if RANKS % nodes == 0]
MANY = "RankscopeManyAlerts"
"""The alert instead of the alerts of an owner who has had ten in an hour: here, each fault is notified."""
ALERTS = f'ALERTS{{alertname!="{MANY}"}}'
READY = f"count(rankscope_rank_up == 1) == {RANKS}"


def _config(interval: str, analyzers: Sequence[str], exporters: Sequence[str], alertmanager: str | None = None) -> str:
    """Return a prometheus.yml that scrapes exporters and analyzers at this interval."""
    config = shipped.prometheus_document(exporters, alertmanager)
    config["global"] |= {"scrape_interval": interval, "evaluation_interval": interval}
    if analyzers:
        job = {"job_name": "rankscope-analyzer", "static_configs": [{"targets": list(analyzers)}]}
        config["scrape_configs"].append(job)
    return yaml.safe_dump(config, sort_keys=False)


def _alertmanager_config(webhook_url: str) -> str:
    config = shipped.alertmanager_document(webhook_url)
    rules = [rule for rule in config["inhibit_rules"] if rule["source_matchers"] != [f'alertname="{MANY}"']]
    assert len(rules) < len(config["inhibit_rules"])
    return yaml.safe_dump({**config, "inhibit_rules": rules}, sort_keys=False)


class MonitoredArena(Arena):
    """Nodes that are monitored at both speeds, with the thresholds of production."""

    def __init__(self, directory: Path, memory: Path, device: str, nodes: int) -> None:
        super().__init__(directory, memory, device, thresholds=None, nodes=nodes)
        targets = [exporter.address for exporter in self.exporters]
        self.analyzers = [servers.analyzer(directory, targets)] if nodes > 1 else []
        self.judges = self.analyzers or self.exporters
        """The servers with findings about the run: the analyzer, or the exporter of the only node."""
        self.stacks = {interval: self._stack(directory / interval, interval, targets) for interval in INTERVALS}
        self.stack = self.stacks[BRISK]

    def _stack(self, directory: Path, interval: str, targets: Sequence[str]) -> Stack:
        directory.mkdir()
        config = partial(_config, interval, [analyzer.address for analyzer in self.analyzers])
        speed: Any = SimpleNamespace(alertmanager_config=_alertmanager_config, prometheus_config=config)
        return Stack(directory, [], speed=speed, targets=targets)

    def _start(self, started: ExitStack) -> None:
        for each in (*self.exporters, *self.analyzers, *self.stacks.values()):
            started.enter_context(each)
        super()._start(started)

    def findings(self) -> Iterator[dict[str, str]]:
        """Yield the labels of the current findings."""
        shown = [line for judge in self.judges for line in metrics(judge.url)]
        lines = [line for line in shown if line.startswith("rankscope_finding_ratio{")]
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                yield {name: value for name, value in sample.labels.items() if value}

    def become_calm(self) -> bool:
        """Wait until there was no finding and no alert for a while. Return whether that happened."""
        since, until = time.monotonic(), time.monotonic() + CALM_WITHIN
        while time.monotonic() < until:
            alerts = [stack.prometheus.query(ALERTS) for stack in self.stacks.values()]
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
    notified: dict[str, dict[str, Any]] = {}

    def has_come() -> bool:
        known = [labels for labels, _ in seen]
        seen.extend((labels, time.time()) for labels in arena.findings() if labels not in known)
        for speed, stack in arena.stacks.items():
            notified[speed] = judge(case, target, onset, stack.webhook.notifications[first[speed] :]).line()
        is_found = scored(seen, [(case, target)], onset)["verdicts"][0]["fired"]
        return is_found and all(one["fired"] for one in notified.values())

    wait_for(has_come, onset + FOUND_WITHIN - time.time())
    score = scored(seen, [(case, target)], onset)
    arena.heal()
    seconds = {speed: one["seconds"] for speed, one in notified.items()}
    return {
        "case": name,
        "is_calm": is_calm,
        "found": score["verdicts"][0],
        **seconds,
        "false_alarms": score["false_alarms"],
    }


def body(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return medians and high quantiles, and a row for each fault; below a heading for each number of nodes."""
    parts = dict.fromkeys(line["nodes"] for line in lines)
    if list(parts) == [1]:
        return _tables(lines)
    tables = {f"## {nodes} nodes": _tables([line for line in lines if line["nodes"] == nodes]) for nodes in parts}
    return [text for heading, found in tables.items() for text in (heading, *found)]


def _tables(lines: Sequence[dict[str, Any]]) -> list[str]:
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


def main() -> int:
    """Measure, print and publish. Return 1 if a fault is not found, or found wrongly."""
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=FAULTS, default=GLOO)
    parser.add_argument(
        "--nodes", type=int, choices=DIVISORS, nargs="+", default=[1], metavar="N", help="one after the other (1)"
    )
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--seed", type=int, default=101)
    options = parser.parse_args()
    wanted = tuple(options.only or FAULTS[options.device])
    named = [
        (name, case) for name, case in all_cases().items() if name.startswith(wanted) and options.device in case.devices
    ]
    random.seed(options.seed)
    lines: list[dict[str, Any]] = []
    for nodes in options.nodes:
        with directories("find") as places, MonitoredArena(*places, options.device, nodes) as arena:
            time.sleep(TRAINS_FOR)
            for name, case in random.sample(named, len(named)):
                line = measure(arena, name, case, Target(rank=random.randrange(1, RANKS)))
                lines.append({"nodes": nodes, **line})
                print(lines[-1], file=sys.stderr, flush=True)
    is_split = options.nodes != [1]
    name = "time_to_find" + "_nodes" * is_split + f"_{ASYNCHRONOUS}" * (options.device == ASYNCHRONOUS)
    title = "Time to find a fault" + " of a run on several nodes" * is_split
    bound = BOUND_ON_NODES if is_split else BOUND
    report.Report(name, title, __doc__, bound, body(lines), lines).publish(options.save)
    return 0 if all(_right(line) == "right" for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
