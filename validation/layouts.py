"""Check whether the exporter finds faults in each parallel layout, and nothing in healthy ones.

    python -m validation.layouts --save
    python -m validation.layouts --device asynchronous --save

A real job of each layout trains for 25 seconds with a fault from its start, or without one. The exporter is real and
as shipped; its findings are read from `/api/v1/runs`. A case is right if exactly the expected finding appears, with its
place. The GPUs and the time of the device are simulated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from testing import report, servers
from testing.job.device import ASYNCHRONOUS, GLOO

from rankscope_exporter.simulation import simulated_uuid

ROOT = Path(__file__).parents[1]
TRAINS_FOR = 25.0  # seconds of training
STARTS_WITHIN = 120.0
STEPS = 100_000
WIDTH = 512
"""Width of the layers: their collectives are not small."""
WORK_MS, FAULT_MS = 10.0, 15.0
"""Milliseconds of forward and of backward in each step, and those added to a slow rank's backward; times the number of
ranks, because they share few CPUs."""


class Case(NamedTuple):
    """A layout, its slow ranks, and the right finding: none if it is healthy."""

    training: str
    slow: tuple[int, ...] = ()
    kind: str = ""
    place: int | str | None = None
    """The rank of a straggler, the stage of an imbalance, the group with a slow link."""
    ranks: int = 4
    cause: str = ""
    fault: str = "backward"
    """The phase in which the ranks are slow, or `link`."""

    @property
    def name(self) -> str:
        what = "slow link of " if self.fault == "link" else "slow "
        slow = f" with {what}{','.join(map(str, self.slow))}" if self.slow else ""
        return f"{self.training} of {self.ranks}{slow}"


CASES = (
    Case("ddp"),
    Case("ddp", (2,), "straggler", 2),
    Case("fsdp2"),
    Case("fsdp2", (1,), "straggler", 1),
    Case("hsdp", ranks=8),
    Case("hsdp", (5,), "straggler", 5, ranks=8),
    Case("tensor_and_data", ranks=8),
    Case("tensor_and_data", (3,), "straggler", 3, ranks=8),
    Case("tensor_and_data", (2, 3), "network", "2-3", 8, "link", "link"),
    Case("pipeline"),
    Case("pipeline", (2,), "stage_imbalance", 2),
    Case("few_micro_batches", (), "bubble"),
    Case("interleaved"),
    Case("interleaved", (2,), "stage_imbalance", 2),
    Case("zero_bubble"),
    Case("zero_bubble", (1,), "stage_imbalance", 1),
    Case("pipeline_and_data"),
    Case("pipeline_and_data", (2,), "straggler", 2),
    Case("pipeline_and_data", (1, 3), "stage_imbalance", 1),
    Case("pipeline_and_data", ranks=8),
    Case("pipeline_and_data", (5,), "straggler", 5, ranks=8),
    Case("pipeline_and_data", (0, 2, 4, 6), "stage_imbalance", 0, ranks=8),
    Case("experts"),
    Case("experts", (1,), "straggler", 1, cause="backward"),
    Case("hot_expert", (), "straggler", 2, cause="expert_imbalance"),
    Case("three_dimensions", ranks=8),
    Case("three_dimensions", (5,), "straggler", 5, ranks=8),
    Case("three_dimensions", (4, 5, 6, 7), "stage_imbalance", 1, ranks=8),
)


@contextmanager
def exporter(directory: Path, ranks: int) -> Iterator[servers.Server]:
    """Start an exporter as shipped."""
    scenario = directory / "scenario.yml"
    scenario.write_text(yaml.safe_dump({"gpus": ranks, "follow_ranks": True}))
    (directory / "run").mkdir()
    server = servers.exporter(directory, str(scenario), directory / "run")
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def job(directory: Path, case: Case, device: str) -> Iterator[subprocess.Popen[bytes]]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", "-m"]
    fault = f"{case.training}:{case.fault if case.slow else 'nothing'}:{'+'.join(map(str, case.slow)) or '0'}"
    command = [*launch, "validation.straggler_job", device, str(STEPS), fault]
    environment = {
        "OMP_NUM_THREADS": "1",
        "RANKSCOPE_RUN_DIR": str(directory / "run"),
        "RANKSCOPE_RUN": "layout",
        "RANKSCOPE_QUIET": "1",
        "WIDTH": str(WIDTH),
        "WORK_MS": str(WORK_MS * case.ranks),
        "FAULT_MS": str(FAULT_MS * case.ranks),
        "CUDA_VISIBLE_DEVICES": ",".join(simulated_uuid(rank, 0) for rank in range(case.ranks)),
    }
    with (directory / "job.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **environment}, cwd=ROOT, stdout=log, stderr=log)
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


def observe(case: Case, device: str) -> dict[str, Any]:
    """Run one case. Return every finding, with the seconds of training until it appeared."""
    with tempfile.TemporaryDirectory(prefix="rankscope-layout-", dir="/dev/shm") as name:
        directory = Path(name)
        with exporter(directory, case.ranks) as server, job(directory, case, device) as process:
            began, found, lost = None, dict[tuple[Any, ...], float](), {}
            until = time.monotonic() + STARTS_WITHIN
            while time.monotonic() < until and process.poll() is None:
                time.sleep(0.5)
                for run in runs(server):
                    if began is None and run["steps_per_second"]:
                        began = time.monotonic()
                        until = began + TRAINS_FOR
                    lost = run.get("lost", {})
                    for one in run["findings"]:
                        key = one["kind"], place_of(one), one["cause"]
                        found.setdefault(key, time.monotonic() - (began or time.monotonic()))
            output = (directory / "job.log").read_text(errors="replace")[-2000:] if began is None else ""
    findings = [[*key, round(seconds, 1)] for key, seconds in found.items()]
    return {"case": case.name, "found": findings, "lost": lost, "output": output, "is_right": is_right(case, findings)}


PLACES = {"straggler": "rank", "network": "group"}
"""By kind what its place is; of others a stage."""


def place_of(finding: Mapping[str, Any]) -> int | str | None:
    """Return the rank, the group or the stage that a finding is about. None if it is about the whole run."""
    stage = finding["evidence"].get("stage")
    place = finding.get(PLACES.get(finding["kind"], ""), stage if stage is None else int(stage))
    return None if place == "" else place


def is_right(case: Case, findings: Sequence[Sequence[Any]]) -> bool:
    """Return whether exactly the expected finding appeared."""
    if not case.kind:
        return not findings
    if len(findings) != 1:
        return False
    kind, place, cause, _ = findings[0]
    if case.cause not in ("", cause):
        return False
    return kind == case.kind and (case.place is None or place == case.place)


def body(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the number of right cases, and each case."""
    right = sum(line["is_right"] for line in lines)
    rows = [(line["case"], "right" if line["is_right"] else "WRONG", _in_words(line["found"])) for line in lines]
    return [f"{right} of {len(lines)} right.", report.table(("case", "", "found: seconds"), rows)]


def _in_words(found: Sequence[Sequence[Any]]) -> str:
    texts = []
    for kind, place, cause, seconds in found:
        where = "" if place is None else f" of {PLACES.get(kind, 'stage')} {place}"
        texts.append(f"{kind}{where} ({cause or '-'}): {seconds}")
    return ", ".join(texts) or "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print and publish. Return 1 if one is wrong."""
    parser = report.parser(__doc__)
    parser.add_argument("--device", choices=(GLOO, ASYNCHRONOUS), default=GLOO)
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[""], help="cases whose name starts with this")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the exporter and the job, too
    lines = []
    for case in CASES:
        if case.name.startswith(tuple(options.only)):
            lines.append(observe(case, options.device))
            print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
    name = "layouts" if options.device == GLOO else "layouts_asynchronous"
    report.Report(name, "Faults in each parallel layout", __doc__, "all right", body(lines), lines).publish(
        options.save
    )
    return int(not all(line["is_right"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
