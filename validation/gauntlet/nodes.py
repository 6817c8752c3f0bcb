"""Eight nodes of one rank each: what no exporter can see alone, told apart by one Prometheus. `make nodes`

    python -m validation.gauntlet.nodes --device asynchronous --rounds 1

On each node an exporter sees one rank, and lays no steps side by side. A rank that is slow, ranks that are slow in turn
and a slow network make the others wait alike; they are told apart by the reference step that every rank shows. Real are
the job (torchrun, loader workers, collectives), eight exporters, Prometheus, Alertmanager and the receiver, at the fast
speed; the nodes are run directories and names.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from testing import servers
from testing.job.device import DEVICES
from testing.job.launch import TrainingJob
from testing.stack import Stack, wait_for
from validation.gauntlet.arena import become_quiet
from validation.gauntlet.node_job import node

NODES = 8
RUN = "train"
# Longer steps than the gauntlet's, as twice as many ranks share the processors.
STEP = {"forward": 60.0, "backward": 120.0}
EXTRA = 90.0  # milliseconds, half of a step
TOLD_WITHIN, STARTS_WITHIN, QUIET_FOR, QUIET_WITHIN = 60.0, 180.0, 10.0, 90.0
REFERENCE_INTERVAL = 2  # seconds: twice the scrape interval
READY = f"count(rate(rankscope_rank_steps_total[4s]) > 1) == {NODES}"


class Fault(NamedTuple):
    """What one or all ranks do from now on, and the notification that is right."""

    everybody: dict[str, float]
    one: dict[str, float]
    alert: str
    cause: str


FAULTS = {
    "slow rank": Fault({}, {"forward": STEP["forward"] + EXTRA}, "RankscopeRankLagging", "forward"),
    "rotating straggler": Fault({"rotating": EXTRA}, {}, "RankscopeRotatingStraggler", "uneven_work"),
    "slow network": Fault({"transfer": EXTRA}, {}, "RankscopeTransferBound", "network"),
}


class NodesJob(TrainingJob):
    """The job of eight ranks on as many nodes."""

    ranks = NODES
    script = "validation.gauntlet.node_job"


@contextmanager
def arena(device: str) -> Iterator[tuple[Stack, NodesJob]]:
    """The job, trained for a while, and all that watches it."""
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-nodes-") as name,
        tempfile.TemporaryDirectory(prefix="rankscope-nodes-", dir="/dev/shm") as memory,
    ):
        directory, run_dir = Path(name), Path(memory, "run")
        flags = [f"--collector.alignment.reference-interval={REFERENCE_INTERVAL}"]
        exporters = []
        for rank in range(NODES):
            (run_dir / node(rank)).mkdir(parents=True)
            exporters.append(servers.exporter(directory, "1", run_dir / node(rank), node(rank), flags))
        job = NodesJob(Path(memory, "job"), RUN, run_dir, device)
        with Stack(directory, exporters) as stack:
            job.start(**STEP)
            try:
                job.wait_until_training()
                yield stack, job
            finally:
                job.terminate()


def inject(stack: Stack, job: NodesJob, name: str, rank: int) -> dict[str, Any]:
    """One fault: what was told of it, and by which clock; then it is healed."""
    fault = FAULTS[name]
    first = len(stack.webhook.notifications)
    onset = job.change({**STEP, **fault.everybody}, {rank: fault.one} if fault.one else {})

    def told() -> list[dict[str, str]]:
        return [n.labels for n in stack.webhook.notifications[first:] if n.is_firing]

    wait_for(lambda: any(labels["alertname"] == fault.alert for labels in told()), TOLD_WITHIN)
    received = [n.received for n in stack.webhook.notifications[first:] if n.is_firing and n.name == fault.alert]
    time.sleep(5)
    found = told()
    clock = stack.prometheus.query(f'group:rankscope_clock:info{{run="{RUN}"}}')
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
        "clock": clock[0]["metric"]["clock"] if clock else None,
        "seconds": round(received[0] - onset, 1) if received else None,
        "told": found,
        "is_right": is_right,
    }


def run(device: str, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Every fault in every round, in an order and of ranks that the seed gives."""
    chance = random.Random(seed)
    with arena(device) as (stack, job):
        for _ in range(rounds):
            for name in chance.sample(list(FAULTS), len(FAULTS)):
                if not become_quiet(stack.prometheus, READY, QUIET_FOR, QUIET_WITHIN):
                    raise RuntimeError(f"not quiet: {stack.prometheus.query('ALERTS')}")
                yield {"device": device, **inject(stack, job, name, chance.randrange(1, NODES))}


def page(results: Sequence[dict[str, Any]], command: str) -> str:
    rows = [f"| {' | '.join(_row(result))} |" for result in results]
    right = sum(r["is_right"] for r in results)
    return "\n".join(
        [
            "# Eight nodes of one rank each",
            "",
            (__doc__ or "").split("\n\n")[2].strip(),
            "",
            f"Right is that alert, its rank and cause, and no other: {right} of {len(results)}.",
            "Seconds are from the onset to the receiver.",
            "",
            "| device | clock | fault | told | seconds | right |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"Made by `{command}`.",
            "",
        ]
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    what = result["fault"] + ("" if result["rank"] is None else f", rank {result['rank']}")
    told = "; ".join(map(_in_words, result["told"])) or "nothing"
    return (
        result["device"],
        str(result["clock"]),
        what,
        told,
        str(result["seconds"]),
        "yes" if result["is_right"] else "NO",
    )


def _in_words(labels: dict[str, str]) -> str:
    where = f" rank {labels['rank']} on {labels.get('node', '?')}" if "rank" in labels else ""
    return f"{labels['alertname']}{where} ({labels.get('cause', 'no cause')})"


def main() -> int:
    """All of it; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(
        prog="make nodes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, nargs="+", default=list(DEVICES))
    parser.add_argument("--rounds", type=int, default=3, help="of all three faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="the figures; the report goes beside it")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "validation.gauntlet.nodes", *sys.argv[1:]])
    results = []
    for device in options.device:
        for result in run(device, options.rounds, options.seed):
            results.append(result)
            print(json.dumps(result), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
                options.json.with_suffix(".md").write_text(page(results, command))
    return 0 if all(result["is_right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
