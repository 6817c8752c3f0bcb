"""What the rules cost: every group's evaluation time, over one run of 1,024 ranks, in a real Prometheus on one core.

    python -m benchmarks.rules_cost [--ranks 1024] [--json FILE]

simulated_ranks.py plays the exporters, one for each eight ranks, with the series that a rank and its GPU have; one rank
lags, so that the rules about causes have something to do. Prometheus runs on one processor (GOMAXPROCS) with the
production rules at production speed, and scrapes all the while. When the window of the rates is full, it is asked for
`prometheus_rule_group_last_duration_seconds` again and again. That is wall time: on a machine that does other things
too the least value says more than the median.
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
from pathlib import Path
from typing import Any

import yaml
from benchmarks.simulated_ranks import RANKS_PER_NODE, serve
from deploy.prometheus.fast import HERE
from examples.demo import servers

INTERVAL = 15.0  # seconds: prometheus.yml's
WARM_UP = 330.0  # seconds: the window of the rates, and what Prometheus needs to begin


def configuration(address: str, nodes: int) -> str:
    """The shipped configuration with these exporters."""
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    config["rule_files"] = [str(HERE / "rules/production/*.yml")]
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
        time.sleep(INTERVAL)
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
        config = configuration(address, -(-options.ranks // RANKS_PER_NODE))
        prometheus = servers.prometheus(directory, config)
        os.environ["GOMAXPROCS"] = "1"
        prometheus.start()
        try:
            time.sleep(WARM_UP)
            durations, series = measure(prometheus, options.readings)
        finally:
            prometheus.stop()
            exporters.shutdown()
    result = report(durations, options.ranks, series)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
