"""Distinguish a slow rank and a slow network on eight nodes of one rank each.

    python -m validation.gauntlet.nodes --device asynchronous --rounds 1 --save

The exporter of each node sees one rank, and cannot align its steps with others. In both cases the other ranks wait
equally long. The analyzer distinguishes them by the steps that it asks all exporters for. The job (torchrun, loader
workers, collectives), eight exporters, Prometheus, Alertmanager and the receiver are real, with scrapes each second;
the nodes are run directories and names. Seconds are from the onset to the receiver.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from testing import report, servers
from testing.job.device import DEVICES
from testing.stack import Stack, wait_for
from testing.webhook import Notification
from validation.gauntlet.arena import NodesJob, become_quiet
from validation.gauntlet.node_job import node

NODES = 8
RUN = "train"
# Longer steps than the gauntlet's, because twice as many ranks share the CPUs.
STEP = {"forward": 60.0, "backward": 120.0}
EXTRA = 90.0  # milliseconds, half of a step
NOTIFIED_WITHIN, STARTS_WITHIN, QUIET_FOR, QUIET_WITHIN = 60.0, 180.0, 10.0, 90.0
READY = f"count(rate(rankscope_rank_steps_total[4s]) > 1) == {NODES}"


class Fault(NamedTuple):
    """The changed behavior of all ranks or of one, and the notification that is right."""

    common: dict[str, float]
    one: dict[str, float]
    alert: str
    cause: str


FAULTS = {
    "slow rank": Fault({}, {"forward": STEP["forward"] + EXTRA}, "RankscopeRankLagging", "forward"),
    "slow network": Fault({"transfer": EXTRA}, {}, "RankscopeTransferBound", "network"),
}


class EightNodesJob(NodesJob):
    """The job of eight ranks on eight nodes, without GPUs."""

    ranks = NODES

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def arena(device: str) -> Iterator[tuple[Stack, EightNodesJob]]:
    """Yield the stack and the job, once all ranks train."""
    with servers.directories("nodes") as (directory, memory):
        run_dir = memory / "run"
        exporters = []
        for rank in range(NODES):
            (run_dir / node(rank)).mkdir(parents=True)
            exporters.append(
                servers.exporter(directory, "1", run_dir / node(rank), node(rank), [f"--node={node(rank)}"])
            )
        exporters.append(servers.analyzer(directory, [exporter.address for exporter in exporters]))
        job = EightNodesJob(memory / "job", RUN, run_dir, device)
        with Stack(directory, exporters) as stack:
            job.start(**STEP)
            try:
                job.wait_until_training()
                yield stack, job
            finally:
                job.terminate()


def inject(stack: Stack, job: EightNodesJob, name: str, rank: int) -> dict[str, Any]:
    """Inject a fault, heal it, and return its notifications."""
    fault = FAULTS[name]
    first = len(stack.webhook.notifications)
    onset = job.change({**STEP, **fault.common}, {rank: fault.one} if fault.one else {})

    def firing() -> list[Notification]:
        return [notification for notification in stack.webhook.notifications[first:] if notification.is_firing]

    wait_for(lambda: any(notification.name == fault.alert for notification in firing()), NOTIFIED_WITHIN)
    received = [notification.received for notification in firing() if notification.name == fault.alert]
    time.sleep(5)
    found = [notification.labels for notification in firing()]
    rows = [labels for labels in found if labels["alertname"] == fault.alert]
    is_right = (
        bool(rows) and rows[0].get("cause") == fault.cause and len({labels["alertname"] for labels in found}) == 1
    )
    if fault.one:
        is_right = is_right and rows[0].get("rank") == str(rank) and rows[0].get("node") == node(rank)
    job.heal(**STEP)
    return {
        "fault": name,
        "rank": rank if fault.one else None,
        "seconds": round(received[0] - onset, 1) if received else None,
        "notified": found,
        "is_right": is_right,
    }


def run(device: str, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the result of every fault in every round; the seed gives the order and the ranks."""
    chance = random.Random(seed)
    with arena(device) as (stack, job):
        for _ in range(rounds):
            for name in chance.sample(list(FAULTS), len(FAULTS)):
                if not become_quiet(stack.prometheus, READY, QUIET_FOR, QUIET_WITHIN):
                    raise RuntimeError(f"not quiet: {stack.prometheus.query('ALERTS')}")
                yield {"device": device, **inject(stack, job, name, chance.randrange(1, NODES))}


def table(results: Sequence[dict[str, Any]]) -> str:
    return report.table(("device", "fault", "notified", "seconds", "right"), map(_row, results))


def _row(result: dict[str, Any]) -> tuple[object, ...]:
    what = result["fault"] + ("" if result["rank"] is None else f", rank {result['rank']}")
    alerts = "; ".join(map(_in_words, result["notified"])) or "nothing"
    is_right = report.yes_or_no(result["is_right"])
    return result["device"], what, alerts, result["seconds"], is_right


def _in_words(labels: dict[str, str]) -> str:
    where = f" rank {labels['rank']} on {labels.get('node', '?')}" if "rank" in labels else ""
    return f"{labels['alertname']}{where} ({labels.get('cause', 'no cause')})"


def main() -> int:
    """Inject all faults and publish. Return 1 if a notification is not right."""
    parser = report.parser(__doc__, prog="nodes")
    parser.add_argument("--device", choices=DEVICES, nargs="+", default=list(DEVICES))
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    results = []
    for device in options.device:
        for result in run(device, options.rounds, options.seed):
            results.append(result)
            print(json.dumps(result), flush=True)
    title, bound = "Eight nodes of one rank each", "that alert, its rank and cause, and no other"
    report.Report("nodes", title, __doc__, bound, [table(results)], results, ["torch"]).publish(options.save)
    return 0 if all(result["is_right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
