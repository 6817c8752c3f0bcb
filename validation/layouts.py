"""Check whether the exporter finds faults in each parallel layout, and nothing in healthy ones.

    python -m validation.layouts --save
    python -m validation.layouts --device asynchronous --save

A real job of each layout trains for 25 seconds with a fault from its start, or without one; with a fault that is not
found until then, for a minute, because smaller losses have to last longer. A seed chooses
the slow rank, stage or link, the time of a step and by how much the fault exceeds it. The exporter is real and as
shipped; its findings are read from `/api/v1/runs`. A run is right if exactly the expected finding appears, with its
place. The GPUs and the time of the device are simulated. An interrupted measurement continues with its ledger in
`build/measurements`.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from testing import report, servers
from testing.job.device import ASYNCHRONOUS, GLOO
from testing.torchrun import environment, forked

from rankscope_exporter.simulation import simulated_uuid

ROOT = Path(__file__).parents[1]
TRAINS_FOR, AT_MOST = 25.0, 60.0  # seconds of training; the second one until an expected finding
STARTS_WITHIN = 120.0
STEPS = 100_000
WIDTH = 512
"""Width of the layers: their collectives are not small."""
SEEDS = range(1, 6)
WORK_MS = 10.0
"""Milliseconds of forward and of backward in each step; times the number of ranks, because they share few CPUs."""
WORK_FACTORS = 0.8, 1.25
DOSES = 1.0, 1.75
"""Of the time that is added to the backward of a slow rank, relative to that of a healthy one."""


class Place(NamedTuple):
    """Ranks that may be slow, and the place of the finding about them."""

    slow: tuple[int, ...]
    name: int | str | None


class Case(NamedTuple):
    """A layout, the right kind of finding, and its possible places; no kind if the layout is healthy."""

    training: str
    kind: str = ""
    places: Sequence[Place] = (Place((), None),)
    """With the rank of a straggler, the stage of an imbalance, the group with a slow link."""
    ranks: int = 4
    cause: str = ""
    fault: str = "backward"
    """The phase in which the ranks are slow, or `link`."""

    @property
    def name(self) -> str:
        return f"{self.training} of {self.ranks}{f', {self.kind}' if self.kind else ''}"


class Draw(NamedTuple):
    """A case with one of its places, and its times in milliseconds."""

    case: Case
    seed: int
    place: Place
    work: float
    """Of forward and of backward."""
    fault: float


def draw(case: Case, seed: int) -> Draw:
    """Choose the case's place and times, always the same for a seed."""
    chance = random.Random(f"{case.name} {seed}")
    work = WORK_MS * chance.uniform(*WORK_FACTORS)
    return Draw(case, seed, chance.choice(case.places), work * case.ranks, chance.uniform(*DOSES) * work * case.ranks)


def each_rank(ranks: int) -> list[Place]:
    """Return one slow rank for each place."""
    return [Place((rank,), rank) for rank in range(ranks)]


def each_stage(stages: int, ranks: int, neighbors: int = 1) -> list[Place]:
    """Return the stages of the ranks; as many neighbors are in one stage."""
    return [
        Place(tuple(rank for rank in range(ranks) if rank // neighbors % stages == stage), stage)
        for stage in range(stages)
    ]


PAIRS = [Place((first, first + 1), f"{first}-{first + 1}") for first in range(0, 8, 2)]
CASES = (
    Case("ddp"),
    Case("ddp", "straggler", each_rank(4)),
    Case("fsdp2"),
    Case("fsdp2", "straggler", each_rank(4)),
    Case("hsdp", ranks=8),
    Case("hsdp", "straggler", each_rank(8), 8),
    Case("tensor_and_data", ranks=8),
    Case("tensor_and_data", "straggler", each_rank(8), 8),
    Case("tensor_and_data", "network", PAIRS, 8, "link", "link"),
    Case("pipeline"),
    Case("pipeline", "stage_imbalance", each_stage(4, 4)),
    Case("few_micro_batches", "bubble"),
    Case("interleaved"),
    Case("interleaved", "stage_imbalance", each_stage(4, 4)),
    Case("zero_bubble"),
    Case("zero_bubble", "stage_imbalance", each_stage(4, 4)),
    Case("pipeline_and_data"),
    Case("pipeline_and_data", "straggler", each_rank(4)),
    Case("pipeline_and_data", "stage_imbalance", each_stage(2, 4)),
    Case("pipeline_and_data", ranks=8),
    Case("pipeline_and_data", "straggler", each_rank(8), 8),
    Case("pipeline_and_data", "stage_imbalance", each_stage(2, 8), 8),
    Case("experts"),
    Case("experts", "straggler", each_rank(4), cause="backward"),
    Case("hot_expert", "straggler", [Place((), rank) for rank in range(4)], cause="expert_imbalance"),
    Case("three_dimensions", ranks=8),
    Case("three_dimensions", "straggler", each_rank(8), 8),
    Case("three_dimensions", "stage_imbalance", each_stage(2, 8, neighbors=4), 8),
)


@contextmanager
def job(directory: Path, drawn: Draw, device: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the training job. Its ranks share one import of PyTorch."""
    case, (slow, place) = drawn.case, drawn.place
    fault = f"{case.training}:{case.fault if slow else 'nothing'}:{'+'.join(map(str, slow)) or '0'}"
    command = forked(case.ranks, ROOT / "validation/straggler_job.py", device, STEPS, fault)
    variables = environment(
        RANKSCOPE_RUN_DIR=str(directory / "run"),
        RANKSCOPE_RUN="layout",
        RANKSCOPE_QUIET="1",
        WIDTH=str(WIDTH),
        WORK_MS=str(drawn.work),
        FAULT_MS=str(drawn.fault),
        HOT_EXPERT=str(place),
        CUDA_VISIBLE_DEVICES=",".join(simulated_uuid(rank, 0) for rank in range(case.ranks)),
    )
    with (directory / "job.log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def runs(server: servers.Server) -> list[Mapping[str, Any]]:
    """Return the exporter's report of every run."""
    with urllib.request.urlopen(f"{server.url}/api/v1/runs", timeout=5) as answer:
        found: list[Mapping[str, Any]] = json.load(answer)["runs"]
    return found


def observe(drawn: Draw, device: str) -> dict[str, Any]:
    """Run one case. Return every finding, with the seconds of training until it appeared."""
    case = drawn.case
    with tempfile.TemporaryDirectory(prefix="rankscope-layout-", dir="/dev/shm") as name:
        directory = Path(name)
        (directory / "run").mkdir()
        exporter = servers.exporter(directory, {"gpus": case.ranks, "follow_ranks": True}, directory / "run")
        with exporter as server, job(directory, drawn, device) as process:
            began, found, lost = None, dict[tuple[Any, ...], float](), {}
            until = time.monotonic() + STARTS_WITHIN
            while time.monotonic() < until and process.poll() is None:
                time.sleep(0.5)
                for run in runs(server):
                    if began is None and run["steps_per_second"]:
                        began = time.monotonic()
                        until = began + (AT_MOST if case.kind else TRAINS_FOR)
                    lost = run.get("lost", {})
                    for one in run["findings"]:
                        key = one["kind"], place_of(one), one["cause"]
                        found.setdefault(key, time.monotonic() - (began or time.monotonic()))
                    if began and found:
                        until = max(began + TRAINS_FOR, time.monotonic())
            output = (directory / "job.log").read_text(errors="replace")[-2000:] if began is None else ""
    findings = [[*key, round(seconds, 1)] for key, seconds in found.items()]
    is_right = began is not None and is_expected(drawn, findings)
    return {
        "id": run_id(case, drawn.seed, device),
        "case": case.name,
        "slow": drawn.place.slow,
        "found": findings,
        "lost": lost,
        "output": output,
        "is_right": is_right,
    }


def run_id(case: Case, seed: int, device: str) -> str:
    return f"{device} {seed} {case.name}"


PLACES = {"straggler": "rank", "network": "group"}
"""By kind what its place is; of others a stage."""


def place_of(finding: Mapping[str, Any]) -> int | str | None:
    """Return the rank, the group or the stage that a finding is about. None if it is about the whole run."""
    stage = finding["evidence"].get("stage")
    place = finding.get(PLACES.get(finding["kind"], ""), stage if stage is None else int(stage))
    return None if place == "" else place


def is_expected(drawn: Draw, findings: Sequence[Sequence[Any]]) -> bool:
    """Return whether exactly the expected finding appeared."""
    case, place = drawn.case, drawn.place.name
    if not case.kind:
        return not findings
    if len(findings) != 1:
        return False
    kind, found_place, cause, _ = findings[0]
    return kind == case.kind and place in (None, found_place) and case.cause in ("", cause)


def body(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the number of right runs, and the runs of each case."""
    right = sum(line["is_right"] for line in lines)
    rows = []
    for case in CASES:
        of_case = [line for line in lines if line["case"] == case.name]
        if of_case:
            found = "; ".join(_in_words(line) for line in of_case) if case.kind else "-"
            rows.append((case.name, f"{sum(line['is_right'] for line in of_case)} of {len(of_case)}", found))
    wrong = [f"- {line['id']}, slow ranks {line['slow']}: {_in_words(line)}" for line in lines if not line["is_right"]]
    return [
        f"{right} of {len(lines)} right.",
        "\n".join(["Wrong:", "", *wrong]) if wrong else "None is wrong.",
        report.table(("case", "right", "found: seconds, in the order of the seeds"), rows),
    ]


def _in_words(line: Mapping[str, Any]) -> str:
    texts = []
    for kind, place, cause, seconds in line["found"]:
        where = "" if place is None else f" of {PLACES.get(kind, 'stage')} {place}"
        texts.append(f"{kind}{where} ({cause or '-'}): {seconds}")
    return ", ".join(texts) or "nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print and publish. Return 1 if one is wrong."""
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=(GLOO, ASYNCHRONOUS), default=GLOO)
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[""], help="cases whose name starts with this")
    parser.add_argument("--seeds", nargs="+", type=int, default=[*SEEDS], help="of places and times (default: 1 to 5)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="cases at the same time (default: 1)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the exporter and the job, too
    name = "layouts" if options.device == GLOO else "layouts_asynchronous"
    ledger = report.Directories().ledger(name)
    wanted = [(case, seed) for seed in options.seeds for case in CASES if case.name.startswith(tuple(options.only))]
    ids = [run_id(case, seed, options.device) for case, seed in wanted]

    def run(case: Case, seed: int) -> None:
        ledger.add(observe(draw(case, seed), options.device))
        print(json.dumps(ledger.lines[-1]), file=sys.stderr, flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        missing = [one for one, name in zip(wanted, ids, strict=True) if not ledger.has(name)]
        list(pool.map(lambda one: run(*one), missing))
    lines = [line for line in ledger.lines if line["id"] in ids]
    title = "Faults in each parallel layout"
    report.Report(name, title, __doc__, "97.5% right", body(lines), lines, ["torch"]).publish(options.save)
    return int(not all(line["is_right"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
