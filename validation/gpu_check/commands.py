"""The commands that need a GPU to be tried: a capture while a kernel spins, and `rankscope check-node`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from testing.servers import Server
from validation.gpu_check import dry_run
from validation.gpu_check.exporter import running
from validation.gpu_check.faults import EVERY, Case, Run
from validation.gpu_check.report import Check, ok_if

SPINNING = Case("spinning_kernel", seconds=20.0 if dry_run.IS_DRY else 60.0, ranks=2)
CAPTURED_AFTER = 20.0  # seconds without a step
STARTS_WITHIN = 60.0  # seconds until the stall
RANKSCOPE = (sys.executable, "-m", "rankscope.cli.launch")


def check(what: str) -> Iterator[Check]:
    """Yield the checks of a command."""
    yield from (check_capture if what == "capture" else check_node)()


def check_node() -> Iterator[Check]:
    """Yield the figures of check-node, and whether it finds this GPU fit for a job."""
    arguments = ["--simulate", "1"] if dry_run.IS_DRY else ["--gpus", "0"]
    began = time.monotonic()
    ran = subprocess.run([*RANKSCOPE, "check-node", "--json", *arguments], capture_output=True, text=True, timeout=90)
    seconds = time.monotonic() - began
    if ran.returncode not in (0, 1, 3):
        yield Check("check-node", "failed", note=f"status {ran.returncode}. {ran.stderr[-500:]}")
        return
    report = json.loads(ran.stdout)
    yield Check("check-node: exit status", ok_if(ran.returncode == 0), str(ran.returncode), "0", f"{seconds:.0f} s")
    for result in report["results"]:
        note = f"{result['outcome']}; expected: {result['expected'] or 'anything'}"
        yield Check(f"check-node: {result['check']}", "measured", result["measured"], note=note)


def check_capture() -> Iterator[Check]:
    """Let the device of rank 1 spin, capture the run, and check that it names the rank and that the job goes on."""
    if subprocess.run([*RANKSCOPE, "capture", "--help"], capture_output=True, check=False).returncode:
        yield Check("capture: the command", "absent")
        return
    with running([]) as (exporter, run_dir), tempfile.TemporaryDirectory() as out:
        spinning = Run(SPINNING, dry_run.DEVICE, run_dir)
        try:
            spinning.start()
            spinning.release()
            steps = wait_for_stall(spinning, exporter)
            yield from capture(spinning, run_dir, Path(out))
            for process in spinning.processes:
                process.wait(SPINNING.seconds + STARTS_WITHIN)
            # The last rank may miss the other one in a step more.
            ended = max((spinning.steps(rank) or 0 for rank in range(SPINNING.ranks)), default=0)
            yield Check("capture: the job goes on", ok_if(ended > steps), f"{ended} steps", f"more than {steps}")
        finally:
            spinning.stop()


def wait_for_stall(spinning: Run, exporter: Server) -> int:
    """Wait until the job has made no step for some time after its first one. Return the number of its steps."""
    steps, since, until = 0, time.monotonic(), time.monotonic() + STARTS_WITHIN
    while time.monotonic() < until and not (steps and time.monotonic() > since + dry_run.shortened(CAPTURED_AFTER)):
        time.sleep(EVERY)
        spinning.look(exporter)
        now = min((int(rank["steps"]) for rank in spinning.state.get("ranks", ())), default=0)
        if now != steps:
            steps, since = now, time.monotonic()
    return steps


def capture(spinning: Run, run_dir: Path, out: Path) -> Iterator[Check]:
    """Yield whether the capture of a run that stands still names the rank that spins."""
    command = [*RANKSCOPE, "capture", spinning.name, str(out), "--run-dir", str(run_dir)]
    began = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    sentence = ran.stdout.strip().splitlines()[0] if ran.stdout.strip() else ran.stderr[-300:]
    note = f"status {ran.returncode} after {time.monotonic() - began:.1f} s"
    yield Check("capture: the first sentence", ok_if("rank 1" in sentence.lower()), sentence, "names rank 1", note)
    pages = [str(path.relative_to(out)) for path in out.rglob("report.html")]
    yield Check("capture: report.html", ok_if(len(pages) == 1), ", ".join(pages))
    sizes = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    yield Check("capture: size", "measured", f"{sum(sizes)} bytes in {len(sizes)} files")
