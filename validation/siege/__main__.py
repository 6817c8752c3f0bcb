"""Make every attack at once on one node for ten minutes, and check the exporter and the job (`make siege`).

    python -m validation.siege --minutes 10 --save

Phases without attackers come before, between and after, so that it takes almost twice as long. It needs root, for
several users and a network namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from testing import report
from testing.processes import cpu_seconds, resident_bytes
from validation.siege.attack import ATTACKS
from validation.siege.figures import Phase
from validation.siege.node import HOST, Node, sleep_until
from validation.siege.report import ABOUT, AGAIN, ALL_USERS, BURN, QUIET, SIEGE, Observed, body, checks
from validation.siege.scraper import Scraped
from validation.siege.target import ATTACKER, RANKS, RUN, VICTIM, Target

NETWORK = f'ip link set lo up && ip address add {HOST}/24 dev lo && exec "$@"'
SETTLED = 15.0  # seconds before the first phase: the rules' windows, and the start-up
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
INSIDE = "RANKSCOPE_SIEGE_INSIDE"
LOOK_EVERY = 1.0
LONGEST_OTHER = 120.0
"""Seconds of a phase without attackers."""


def main() -> int:
    """Run the siege and publish; return 1 if a check fails, 2 if the siege did not run."""
    parser = report.parser(__doc__, prog="make siege")
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="minutes of siege, plus other phases",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds into which they are divided")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="ATTACK")
    parser.add_argument("--tls", action="store_true", help="have the exporter serve HTTPS")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("siege: needs root", file=sys.stderr)
        return 2
    if INSIDE not in os.environ:
        _run_in_network_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop everything, too
    observed = _observed(options)
    title, bound = "A node under siege", "every check holds"
    name = "siege_tls" if options.tls else "siege"
    report.Report(name, title, ABOUT, bound, body(observed), asdict(observed)).publish(options.save)
    return 0 if all(check.holds for check in checks(observed)) else 1


def _run_in_network_namespace() -> NoReturn:
    command = [sys.executable, "-m", "validation.siege", *sys.argv[1:]]
    os.environ[INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", NETWORK, "sh", *command])


def _observed(options: argparse.Namespace) -> Observed:
    autogroup = AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else "absent"
    observed = Observed(options.minutes, options.rounds, autogroup)
    directory = Path(tempfile.mkdtemp(prefix="rankscope-siege-"))  # has Prometheus' database; kept on failure
    directory.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="rankscope-siege-", dir="/dev/shm") as name:
        memory = Path(name)
        memory.chmod(0o755)
        with Node(directory, memory, tls=options.tls) as node:
            print(f"logs in {directory}", file=sys.stderr)
            time.sleep(SETTLED)
            _besiege(node, observed, options)
            _read_results(node, observed)
    shutil.rmtree(directory)
    return observed


def _besiege(node: Node, observed: Observed, options: argparse.Namespace) -> None:
    attacked = options.minutes * 60 / options.rounds
    other = min(attacked / 4, LONGEST_OTHER)
    for number in range(options.rounds):
        _phase(node, observed, QUIET, number, other)
        targets = node.targets(options.only)
        of_one_user = {name: target for name, target in targets.items() if ATTACKS[name].uid == ATTACKER}
        others = {name: target for name, target in targets.items() if name not in of_one_user}
        with node.attacked(of_one_user) as reports:
            _phase(node, observed, SIEGE, number, attacked / 2)
            with node.attacked(others) as more:
                _phase(node, observed, ALL_USERS, number, attacked / 2)
        reports |= more
        observed.attackers += reports.items()
        with node.attacked(_burners(targets, reports)):
            _phase(node, observed, BURN, number, other)
        _phase(node, observed, AGAIN, number, other)


def _burners(targets: dict[str, Target], reports: dict[str, dict[str, Any]]) -> dict[str, Target]:
    """Return the same processes, each with the CPU use that it had as an attacker."""
    shares = {name: report["cpu"] / report["seconds"] for name, report in reports.items() if report["seconds"]}
    return {name: replace(targets[name], share=share) for name, share in shares.items() if share > 0}


def _phase(node: Node, observed: Observed, name: str, number: int, seconds: float) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    began, cpu = time.time(), cpu_seconds(node.exporter_pid)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        observed.load.append(os.getloadavg()[0])
        sleep_until(time.monotonic() + min(LOOK_EVERY, left))
    observed.phases.append(Phase(name, number, began, time.time(), cpu_seconds(node.exporter_pid) - cpu))
    saved = [path for path in node.state.iterdir() if path.is_file()]
    has_victims = any(path.name.startswith(f"state-{VICTIM}") for path in saved)
    observed.saved.append((sum(path.stat().st_size for path in saved), has_victims))


def _read_results(node: Node, observed: Observed) -> None:
    observed.peak = resident_bytes(node.exporter_pid, "VmHWM")
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
