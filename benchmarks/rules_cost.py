"""Measure the cost of one evaluation of the rules over one run of 1,024 ranks, in a real Prometheus on one core.

    python -m benchmarks.rules_cost --save

It measures the first Prometheus on the PATH, e.g. Debian 12's (2.42). To measure another one, such as that of
docker-compose.yml, put its directory first: `PATH=…/prometheus-3.5:$PATH`.

simulated_ranks.py stands in for the exporters, one for each eight ranks, with the series of a rank and its GPU under
NCCL, and a finding. Prometheus runs on one core (GOMAXPROCS=1) and scrapes each 15 s meanwhile. It reports how long the
last evaluation of each rule took. That is wall time: on a machine with other load, the shortest is better than the
median. *CPU* is all of Prometheus' CPU time, including scrapes and storage.
"""

from __future__ import annotations

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
from deploy.prometheus.shipped import HERE, RULES
from testing import report, servers
from testing.simulated_ranks import RANKS_PER_NODE, serve

SHOWN = 12  # rules
WARM_UP = 120.0  # seconds until most ranges are full
INTERVAL = 5.0  # seconds between evaluations
BOUND = 0.020
"""Seconds of an evaluation of all rules."""


def configuration(address: str, nodes: int) -> str:
    """Return the shipped configuration with these exporters."""
    config = yaml.safe_load((HERE / "prometheus.yml").read_text())
    config["rule_files"] = [str(RULES)]
    config["alerting"] = {"alertmanagers": []}
    targets = [
        {"targets": [address], "labels": {"instance": f"node-{node}", "__metrics_path__": f"/{node}"}}
        for node in range(nodes)
    ]
    own = {"job_name": "prometheus", "static_configs": [{"targets": ["localhost:9090"]}]}
    config["scrape_configs"] = [{"job_name": "rankscope", "static_configs": targets}, own]
    return yaml.safe_dump(config)


def measure(prometheus: servers.Prometheus, readings: int) -> list[dict[str, float]]:
    """Return the seconds of each rule's last evaluation, read once an interval."""
    found = []
    for _ in range(readings):
        time.sleep(INTERVAL)
        groups = json.loads(_get(f"{prometheus.url}/api/v1/rules"))["data"]["groups"]
        seconds: dict[str, float] = {}
        for rule in (rule for group in groups for rule in group["rules"]):
            seconds[rule["name"]] = seconds.get(rule["name"], 0.0) + rule["evaluationTime"]
        found.append(seconds)
    return found


def self_metrics(prometheus: servers.Prometheus) -> dict[str, float]:
    """Return Prometheus' metrics about itself, by name and labels."""
    return {
        name: float(value)
        for name, value in re.findall(r"^(\w+(?:{[^}]*})?) (\S+)$", _get(f"{prometheus.url}/metrics"), re.M)
    }


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - loopback
        return str(answer.read().decode())


def version() -> str:
    """Return the version of the measured Prometheus."""
    done = subprocess.run([servers.program("prometheus"), "--version"], capture_output=True, text=True, check=True)
    return re.findall(r"version (\S+)", done.stdout + done.stderr)[0]


def figures(seconds: list[float]) -> dict[str, float]:
    """Return the median and the least."""
    return {"median": round(statistics.median(seconds), 4), "least": round(min(seconds), 4)}


def run(ranks: int, readings: int) -> dict[str, Any]:
    """Return evaluation seconds of all rules and the costliest, and rates of samples and CPU."""
    with serve(ranks) as address, tempfile.TemporaryDirectory() as name:
        configured = configuration(address, -(-ranks // RANKS_PER_NODE))
        with servers.prometheus(Path(name), configured) as prometheus:
            time.sleep(WARM_UP)
            began, before = time.monotonic(), self_metrics(prometheus)
            durations = measure(prometheus, readings)
            took, after = time.monotonic() - began, self_metrics(prometheus)
    samples, cpu = "prometheus_tsdb_head_samples_appended_total", "process_cpu_seconds_total"
    rules = {name: figures([reading[name] for reading in durations]) for name in durations[-1]}
    return {
        "series": int(after["prometheus_tsdb_head_series"]),
        "samples_a_second": round(sum(_growth(samples, before, after)) / took),
        "cpu": round(sum(_growth(cpu, before, after)) / took, 3),
        "names": len(rules),
        "together": figures([sum(reading.values()) for reading in durations]),
        "costliest": dict(sorted(rules.items(), key=lambda rule: -rule[1]["median"])[:SHOWN]),
        "load": round(os.getloadavg()[0], 1),
    }


def _growth(name: str, before: dict[str, float], after: dict[str, float]) -> list[float]:
    return [after[key] - before[key] for key in after if key.startswith(name)]


def tables(found: dict[str, Any]) -> list[str]:
    """Return tables of the evaluation of all rules, and of the costliest ones."""
    heads = ["one evaluation, median", "shortest", "samples a second", "CPU, of a core", "series"]
    together = found["together"]
    row = [
        f"{1000 * together['median']:.0f} ms",
        f"{1000 * together['least']:.0f} ms",
        f"{found['samples_a_second']:,}",
        f"{found['cpu']:.0%}",
        f"{found['series']:,}",
    ]
    costly = [(rule, *(f"{1000 * seconds:.1f}" for seconds in of.values())) for rule, of in found["costliest"].items()]
    about = f"The most costly of {found['names']} rules:"
    return [report.table(heads, [row]), about, report.table(["rule", "median (ms)", "shortest (ms)"], costly)]


def main() -> int:
    """Measure, print and publish. Return 1 if an evaluation takes longer than BOUND."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--readings", type=int, default=20)
    options = parser.parse_args()
    os.environ["GOMAXPROCS"] = "1"
    found = run(options.ranks, options.readings)
    amount = f"One run of {options.ranks} ranks on nodes of eight, in Prometheus {version()}."
    bound = f"{1000 * BOUND:.0f} ms"
    report.Report("rules_cost", "Cost of the rules", __doc__, bound, [amount, *tables(found)], found).publish(
        options.save
    )
    return int(found["together"]["median"] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
