"""Every attack at once on one node, for ten minutes, and whether what must not give way does. `make siege`

    python -m validation.siege --minutes 10 --json docs/measurements/siege.json

Phases without attackers stand between and beside, so that it takes almost twice as long. Only root can do this: it
takes several users, and a network of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from validation.siege.attack import ATTACKS
from validation.siege.figures import Phase
from validation.siege.node import HOST, Node, load, sleep_until
from validation.siege.report import AGAIN, BURN, QUIET, SIEGE, Observed, page, summary
from validation.siege.scraper import Scraped
from validation.siege.target import RANKS, RUN, VICTIM, Target

NETWORK = f'ip link set lo up && ip address add {HOST}/24 dev lo && exec "$@"'
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
SETTLED = 15.0  # seconds before the first phase: the rules' windows, and what a start costs
LOOK_EVERY = 1.0


def main() -> int:
    """All of it; 1 if anything did not hold, 2 if it did not run."""
    parser = argparse.ArgumentParser(
        prog="make siege", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="of siege; a quarter each of burn and quiet, twice")
    parser.add_argument("--rounds", type=int, default=3, help="into which they are divided")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--json", type=Path, help="the figures; the page goes beside it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("siege: only root can do this", file=sys.stderr)
        return 2
    if not options.inside:
        _in_a_network_of_its_own()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is stopped then too
    figures = summary(_observed(options))
    print(page(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
        options.json.with_suffix(".md").write_text(page(figures))
    return 0 if all(check["holds"] for check in figures["checks"]) else 1


def _in_a_network_of_its_own() -> NoReturn:
    command = [sys.executable, "-m", "validation.siege", "--inside", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", NETWORK, "sh", *command])


def _observed(options: argparse.Namespace) -> Observed:
    arguments = [argument for argument in sys.argv[1:] if argument != "--inside"]
    groups = AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else "absent"
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "rounds": options.rounds, "groups": groups}
    observed = Observed(shlex.join(["python", "-m", "validation.siege", *arguments]), options.minutes, machine)
    directory = Path(tempfile.mkdtemp(prefix="rankscope-siege-"))  # with Prometheus' database: stays if anything fails
    directory.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="rankscope-siege-", dir="/dev/shm") as name:
        memory = Path(name)
        memory.chmod(0o755)
        with Node(directory, memory) as node:
            print(f"logs in {directory}", file=sys.stderr)
            time.sleep(SETTLED)
            _besiege(node, observed, options)
            _look_back(node, observed)
    shutil.rmtree(directory)
    return observed


def _besiege(node: Node, observed: Observed, options: argparse.Namespace) -> None:
    attacked = options.minutes * 60 / options.rounds
    for number in range(options.rounds):
        _phase(node, observed, QUIET, number, attacked / 4)
        targets = node.targets(options.only)
        with node.attacked(targets) as reports:
            _phase(node, observed, SIEGE, number, attacked)
        observed.attackers += reports.items()
        with node.attacked(_burners(targets, reports)):
            _phase(node, observed, BURN, number, attacked / 4)
        _phase(node, observed, AGAIN, number, attacked / 4)


def _burners(targets: dict[str, Target], reports: dict[str, dict[str, Any]]) -> dict[str, Target]:
    """The same processes, each with the processor time that it took as an attacker."""
    shares = {name: report["processor"] / report["seconds"] for name, report in reports.items() if report["seconds"]}
    return {name: replace(targets[name], share=share) for name, share in shares.items() if share > 0}


def _phase(node: Node, observed: Observed, name: str, number: int, seconds: float) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    began, processor = time.time(), node.processor()
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        observed.resident.append(node.memory("VmRSS"))
        observed.load.append(load())
        sleep_until(time.monotonic() + min(LOOK_EVERY, left))
    observed.phases.append(Phase(name, number, began, time.time(), node.processor() - processor))


def _look_back(node: Node, observed: Observed) -> None:
    observed.peak = node.memory("VmHWM")
    observed.steps = node.job.progress.read_steps()
    observed.scrapes = [Scraped(**json.loads(line)) for line in node.scrapes.read_text().splitlines()]
    began, ended = observed.phases[0].began, observed.phases[-1].ended
    window = f"[{int(ended - began)}s] @ {ended}"
    for series in node.prometheus.query(f'ALERTS{{alertstate="firing"}}{window}'):
        since = float(series["values"][0][0])
        phase = next((phase.name for phase in observed.phases if phase.has(since)), "between")
        observed.alerts.append({"labels": series["metric"], "since": since - began, "phase": phase})
    good = _counted(node, f"sum_over_time(up{window})")
    observed.failed = _counted(node, f"count_over_time(up{window})") - good
    for rank in range(RANKS):
        selector = f'rankscope_rank_up{{run="{RUN}",rank="{rank}",owner="{VICTIM}"}}'
        observed.missed[str(rank)] = good - _counted(node, f"sum_over_time({selector}{window})")


def _counted(node: Node, expression: str) -> int:
    return sum(int(float(one["value"][1])) for one in node.prometheus.query(expression))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
