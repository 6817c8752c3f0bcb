"""What the rules cost: an evaluation's time, over one run of 1,024 ranks, in a real Prometheus on one core.

    python -m benchmarks.rules_cost [--ranks 1024] [--speeds 15s 5s] [--json docs/measurements/rules_cost.json]

The Prometheus is the first on the PATH. To measure another than Debian 12's (2.42), such as that of docker-compose.yml,
put its directory first: `PATH=…/prometheus-3.5:$PATH`.

simulated_ranks.py plays the exporters, one for each eight ranks, with the series that a rank and its GPU have under
NCCL; one rank lags, so that the rules about causes have something to do. Prometheus runs on one processor (GOMAXPROCS)
with the rules for a scrape interval, and scrapes all the while. When the windows are full, it is asked again and again
how long the last evaluation of each rule took, and for the series that the rules have recorded. That is wall time: on a
machine that does other things too the least value says more than the median. What it took of its processor for all
that, scrapes and storage included, is by its own account.
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
from deploy.prometheus import render
from deploy.prometheus.shipped import HERE
from testing import servers
from testing.simulated_node import markdown
from testing.simulated_ranks import RANKS_PER_NODE, serve

SPEEDS = {speed.name: speed for speed in render.SPEEDS if not speed.is_fast}
SHOWN = 12  # rules
WARM_UP = 330.0  # seconds: the windows, but for the longest tier's, and what Prometheus needs to begin


def configuration(address: str, nodes: int, speed: render.Speed) -> str:
    """The shipped configuration with these exporters, at this speed."""
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    interval = f"{speed.interval}s"
    config["global"] |= {"scrape_interval": interval, "evaluation_interval": interval, "scrape_timeout": interval}
    config["rule_files"] = [str(HERE / f"rules/{speed.name}.yml")]
    config["alerting"] = {"alertmanagers": []}
    targets = [
        {"targets": [address], "labels": {"instance": f"node-{node}", "__metrics_path__": f"/{node}"}}
        for node in range(nodes)
    ]
    own = {"job_name": "prometheus", "static_configs": [{"targets": ["localhost:9090"]}]}
    config["scrape_configs"] = [{"job_name": "rankscope", "static_configs": targets}, own]
    return yaml.safe_dump(config)


def measure(prometheus: servers.Prometheus, readings: int, speed: render.Speed) -> list[dict[str, float]]:
    """Seconds of each rule's last evaluation, read once an interval."""
    found = []
    for _ in range(readings):
        time.sleep(speed.interval)
        (group,) = json.loads(_get(f"{prometheus.url}/api/v1/rules"))["data"]["groups"]
        seconds: dict[str, float] = {}
        for rule in group["rules"]:
            seconds[rule["name"]] = seconds.get(rule["name"], 0.0) + rule["evaluationTime"]
        found.append(seconds)
    return found


def own(prometheus: servers.Prometheus) -> dict[str, float]:
    """What it says of itself, by name and labels."""
    return {
        name: float(value)
        for name, value in re.findall(r"^(\w+(?:{[^}]*})?) (\S+)$", _get(f"{prometheus.url}/metrics"), re.M)
    }


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


def figures(seconds: list[float]) -> dict[str, float]:
    """Median and least."""
    return {"median": round(statistics.median(seconds), 4), "least": round(min(seconds), 4)}


def run(ranks: int, speed: render.Speed, readings: int) -> dict[str, Any]:
    """Measure at one speed: evaluations in seconds, of all rules together and of the dearest; series; samples and
    processor time a second."""
    exporters = serve(ranks)
    address = f"127.0.0.1:{exporters.server_address[1]}"
    with tempfile.TemporaryDirectory() as name:
        prometheus = servers.prometheus(Path(name), configuration(address, -(-ranks // RANKS_PER_NODE), speed))
        prometheus.start()
        try:
            time.sleep(WARM_UP)
            began, before = time.monotonic(), own(prometheus)
            durations = measure(prometheus, readings, speed)
            took, after = time.monotonic() - began, own(prometheus)
            records = recorded(prometheus)
        finally:
            prometheus.stop()
            exporters.shutdown()
    samples, processor = "prometheus_tsdb_head_samples_appended_total", "process_cpu_seconds_total"
    rules = {name: figures([reading[name] for reading in durations]) for name in durations[-1]}
    return {
        "series": int(after["prometheus_tsdb_head_series"]),
        "recorded_a_rank": round(records / ranks, 1),
        "samples_a_second": round(sum(_growth(samples, before, after)) / took),
        "processor": round(sum(_growth(processor, before, after)) / took, 3),
        "names": len(rules),
        "together": figures([sum(reading.values()) for reading in durations]),
        "dearest": dict(sorted(rules.items(), key=lambda rule: -rule[1]["median"])[:SHOWN]),
        "load": round(os.getloadavg()[0], 1),
    }


def _growth(name: str, before: dict[str, float], after: dict[str, float]) -> list[float]:
    return [after[key] - before[key] for key in after if key.startswith(name)]


def page(result: dict[str, Any]) -> str:
    """The report for people."""
    heads = ["scrapes each", "one evaluation, median", "least", "samples a second", "processor, of one", "series"]
    rows = [
        [
            name,
            f"{1000 * one['together']['median']:.0f} ms",
            f"{1000 * one['together']['least']:.0f} ms",
            f"{one['samples_a_second']:,}",
            f"{one['processor']:.0%}",
            f"{one['series']:,} ({one['recorded_a_rank']} recorded a rank)",
        ]
        for name, one in result["speeds"].items()
    ]
    first = next(iter(result["speeds"].values()))
    dearest = [[name, *(f"{1000 * seconds:.0f}" for seconds in of.values())] for name, of in first["dearest"].items()]
    return (
        f"# rules_cost\n\nAll {first['names']} rules over one run of {result['ranks']} ranks under NCCL, on nodes of "
        f"eight, in a real\nPrometheus {result['prometheus']} with one processor (GOMAXPROCS=1) that scrapes simulated "
        f"exporters meanwhile, on {result['cores']} cores\nthat others used too: what they took is in the wall times, "
        "and least of all in the least. The processor is what Prometheus took in\nall, scrapes and storage included. "
        "Made by `python -m benchmarks.rules_cost --json docs/measurements/rules_cost.json`.\n\n"
        f"{markdown(heads, rows)}\n\nThe dearest in an evaluation, scrapes each {next(iter(result['speeds']))}:\n\n"
        f"{markdown(['what is recorded, or the alert', 'median, ms', 'least, ms'], dearest)}\n"
    )


def main() -> int:
    """Measure and print; with --json also write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    parser.add_argument("--readings", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["GOMAXPROCS"] = "1"
    speeds = {name: run(options.ranks, SPEEDS[name], options.readings) for name in options.speeds}
    result = {"ranks": options.ranks, "cores": os.cpu_count(), "prometheus": version(), "speeds": speeds}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
        options.json.with_suffix(".md").write_text(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
