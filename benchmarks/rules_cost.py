"""What the rules cost: every group's evaluation time, over one run of 1,024 ranks, in a real Prometheus on one core.

    python -m benchmarks.rules_cost [--ranks 1024] [--json FILE]

simulated_ranks.py plays the exporters, one for each eight ranks, with the series that a rank and its GPU have; one rank
lags, so that the rules about causes have something to do. Prometheus is pinned to one core and runs the production
rules with all durations and intervals a third, so that each window holds as many samples as in production and is full
sooner. Then `prometheus_rule_group_last_duration_seconds` is read again and again. It is wall time: on a machine that
does other things too the least value says more than the median.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from benchmarks.simulated_ranks import RANKS_PER_NODE, serve
from deploy.prometheus import render
from deploy.prometheus.fast import HERE
from examples.demo import servers

HASTE = 3
WARM_UP = 6 * 60  # seconds, before they are shortened: the window of the rates, and what Prometheus needs to begin


def rules(directory: Path) -> str:
    """The production rules with every duration `HASTE` times shorter, as a pattern of file names."""
    thresholds = render.load_thresholds(HERE / "thresholds.yml")
    hasty = {name: {**fields, "production": _hasty(fields["production"])} for name, fields in thresholds.items()}
    for source in sorted((HERE / "rules/source").glob("*.yml")):
        (directory / source.name).write_text(render.render(source.read_text(), hasty, "production", source.name))
    return str(directory / "*.yml")


def _hasty(value: Any) -> Any:
    try:
        return f"{float(render.seconds(str(value))) / HASTE * 1000:.0f}ms"
    except ValueError:
        return value


def configuration(address: str, nodes: int, rule_files: str) -> str:
    """The shipped configuration with these exporters."""
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    interval = f"{15 // HASTE}s"
    config["global"] = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    config["rule_files"] = [rule_files]
    config["alerting"] = {"alertmanagers": []}
    targets = [
        {"targets": [address], "labels": {"instance": f"node-{node}", "__metrics_path__": f"/{node}"}}
        for node in range(nodes)
    ]
    own = {"job_name": "prometheus", "static_configs": [{"targets": ["localhost:9090"]}]}
    config["scrape_configs"] = [{"job_name": "rankscope", "static_configs": targets}, own]
    return yaml.safe_dump(config)


def measure(prometheus: servers.Prometheus, readings: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each group's last evaluation, read once an interval; and how many series Prometheus has."""
    found: dict[str, list[float]] = {}
    for _ in range(readings):
        time.sleep(15 / HASTE)
        with urllib.request.urlopen(f"{prometheus.url}/metrics", timeout=30) as answer:  # noqa: S310 - loopback
            text = answer.read().decode()
        for group, seconds in re.findall(
            r'^prometheus_rule_group_last_duration_seconds\{rule_group="[^"]*;(\w+)"\} (\S+)$', text, re.M
        ):
            found.setdefault(group, []).append(float(seconds))
    (series,) = re.findall(r"^prometheus_tsdb_head_series (\S+)$", text, re.M)
    return found, int(float(series))


def report(durations: dict[str, list[float]], ranks: int, series: int) -> dict[str, Any]:
    """What is kept: by group the median and the least, and their sums. Seconds."""
    groups = {
        group: {"median": round(statistics.median(values), 4), "least": round(min(values), 4)}
        for group, values in sorted(durations.items())
    }
    sums = {name: round(sum(group[name] for group in groups.values()), 4) for name in ("median", "least")}
    return {"ranks": ranks, "series": series, "groups": groups, "together": sums}


def main() -> int:
    """Measure and print; with --json also write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--readings", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    exporters = serve(options.ranks)
    address = f"127.0.0.1:{exporters.server_address[1]}"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "rules").mkdir()
        config = configuration(address, -(-options.ranks // RANKS_PER_NODE), rules(directory / "rules"))
        prometheus = servers.prometheus(directory, config)
        with one_core():
            prometheus.start()
        try:
            time.sleep(WARM_UP / HASTE)
            durations, series = measure(prometheus, options.readings)
        finally:
            prometheus.stop()
            exporters.shutdown()
    result = report(durations, options.ranks, series)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


@contextmanager
def one_core() -> Iterator[None]:
    """Programs that are started in here keep to one core; Go sees no more than that."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)


if __name__ == "__main__":
    sys.exit(main())
