"""What the rules cost: every group's evaluation time, over one run of 1,024 ranks, in a real Prometheus on one core.

    python -m benchmarks.rules_cost [--ranks 1024] [--json docs/measurements/rules_cost.json]

The Prometheus is the first on the PATH. To measure another than Debian 12's (2.42), such as that of docker-compose.yml,
put its directory first: `PATH=…/prometheus-3.5:$PATH`.

simulated_ranks.py plays the exporters, one for each eight ranks, with the series that a rank and its GPU have; one rank
lags, so that the rules about causes have something to do. Prometheus runs on one processor (GOMAXPROCS) with the
production rules at production speed, and scrapes all the while. When the window of the rates is full, it is asked for
`prometheus_rule_group_last_duration_seconds` again and again, and for the series that the rules have recorded. That is
wall time: on a machine that does other things too the least value says more than the median.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from benchmarks.simulated_node import markdown
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


def recorded(prometheus: servers.Prometheus) -> int:
    """Series that rules have recorded. A record's name has colons, which no exporter's may have."""
    return int(prometheus.query('count({__name__=~".+:.+:.+"})')[0]["value"][1])


def version() -> str:
    """Of the Prometheus that is measured."""
    done = subprocess.run([servers.program("prometheus"), "--version"], capture_output=True, text=True, check=True)
    return re.findall(r"version (\S+)", done.stdout + done.stderr)[0]


def report(durations: dict[str, list[float]], ranks: int, series: int, records: int) -> dict[str, Any]:
    """What is kept: by group the median and the least, and their sums, in seconds; and where it was measured."""
    groups = {
        group: {"median": round(statistics.median(values), 4), "least": round(min(values), 4)}
        for group, values in sorted(durations.items())
    }
    sums = {name: round(sum(group[name] for group in groups.values()), 4) for name in ("median", "least")}
    size = {"ranks": ranks, "series": series, "recorded_a_rank": round(records / ranks, 1)}
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "prometheus": version()}
    return {**size, "groups": groups, "together": sums, **machine}


def page(result: dict[str, Any]) -> str:
    """The report for people."""
    groups = {**result["groups"], "together": result["together"]}
    rows = [[name, *(f"{1000 * seconds:.0f}" for seconds in group.values())] for name, group in groups.items()]
    size = f"one run of {result['ranks']} ranks ({result['series']} series, of which the rules record "
    load = f"{result['cores']} cores that others used too (load {result['load']} at the end)"
    return (
        f"# rules_cost\n\nAll rules over {size}{result['recorded_a_rank']} a rank), at\nproduction speed, in a real "
        f"Prometheus {result['prometheus']} with one processor (GOMAXPROCS=1) that scrapes simulated exporters "
        "meanwhile.\n"
        f"Wall time of one evaluation, of which one is due every {INTERVAL:g} s, on {load}:\n"
        "what they took is in these figures too, and least of all in the least. Made by\n"
        "`python -m benchmarks.rules_cost --json docs/measurements/rules_cost.json`.\n\n"
        f"{markdown(['group of rules', 'median, ms', 'least, ms'], rows)}\n"
    )


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
            records = recorded(prometheus)
        finally:
            prometheus.stop()
            exporters.shutdown()
    result = report(durations, options.ranks, series, records)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
        options.json.with_suffix(".md").write_text(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
