"""What the rules cost: an evaluation's time, over one run of 1,024 ranks, in a real Prometheus on one core.

    python -m benchmarks.rules_cost [--ranks 1024] [--json docs/measurements/rules_cost.json]

The Prometheus is the first on the PATH. To measure another than Debian 12's (2.42), such as that of docker-compose.yml,
put its directory first: `PATH=…/prometheus-3.5:$PATH`.

simulated_ranks.py plays the exporters, one for each eight ranks, with the series that a rank and its GPU have under
NCCL; one rank lags, so that the rules about causes have something to do. Prometheus runs on one processor (GOMAXPROCS)
with the production rules at production speed, and scrapes all the while. When the window of the rates is full, it is
asked again and again how long the last evaluation of each rule took, and for the series that the rules have recorded.
That is wall time: on a machine that does other things too the least value says more than the median.
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
SHOWN = 12  # rules
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


def measure(prometheus: servers.Prometheus, readings: int) -> tuple[list[dict[str, float]], int]:
    """Seconds of each rule's last evaluation, read once an interval; and how many series Prometheus has."""
    found = []
    for _ in range(readings):
        time.sleep(INTERVAL)
        (group,) = json.loads(_get(f"{prometheus.url}/api/v1/rules"))["data"]["groups"]
        seconds: dict[str, float] = {}
        for rule in group["rules"]:
            seconds[rule["name"]] = seconds.get(rule["name"], 0.0) + rule["evaluationTime"]
        found.append(seconds)
    (series,) = re.findall(r"^prometheus_tsdb_head_series (\S+)$", _get(f"{prometheus.url}/metrics"), re.M)
    return found, int(float(series))


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - loopback
        return str(answer.read().decode())


def recorded(prometheus: servers.Prometheus) -> int:
    """Series that rules have recorded. A record's name has colons, which no exporter's may have."""
    return int(prometheus.query('count({__name__=~".+:.+:.+"})')[0]["value"][1])


def version() -> str:
    """Of the Prometheus that is measured."""
    done = subprocess.run([servers.program("prometheus"), "--version"], capture_output=True, text=True, check=True)
    return re.findall(r"version (\S+)", done.stdout + done.stderr)[0]


def report(durations: list[dict[str, float]], ranks: int, series: int, records: int) -> dict[str, Any]:
    """What is kept: median and least, in seconds, of all rules together and of the dearest; and where that was."""
    rules = {name: _figures([reading[name] for reading in durations]) for name in durations[-1]}
    dearest = dict(sorted(rules.items(), key=lambda rule: -rule[1]["median"])[:SHOWN])
    together = _figures([sum(reading.values()) for reading in durations])
    size = {"ranks": ranks, "series": series, "recorded_a_rank": round(records / ranks, 1)}
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "prometheus": version()}
    return {**size, "names": len(rules), "together": together, "dearest": dearest, **machine}


def _figures(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 4), "least": round(min(seconds), 4)}


def page(result: dict[str, Any]) -> str:
    """The report for people."""
    lines = {f"all {result['names']}": result["together"], **result["dearest"]}
    rows = [[name, *(f"{1000 * seconds:.0f}" for seconds in of.values())] for name, of in lines.items()]
    size = f"one run of {result['ranks']} ranks under NCCL, on nodes of eight ({result['series']} series, of which\n"
    load = f"{result['cores']} cores that others used too (load {result['load']} at the end)"
    return (
        f"# rules_cost\n\nAll rules over {size}the rules record {result['recorded_a_rank']} a rank), at production "
        f"speed, in a real Prometheus {result['prometheus']} with one processor (GOMAXPROCS=1) that scrapes simulated "
        "exporters meanwhile.\n"
        f"Wall time of one evaluation, of which one is due every {INTERVAL:g} s, on {load}:\n"
        "what they took is in these figures too, and least of all in the least. Below all are the dearest. Made by\n"
        "`python -m benchmarks.rules_cost --json docs/measurements/rules_cost.json`.\n\n"
        f"{markdown(['what is recorded, or the alert', 'median, ms', 'least, ms'], rows)}\n"
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
