"""Check the exporter and the hook on a real GPU: `make gpu-check`, at most 10 minutes.

The machine needs `nvidia-smi`, Python 3.11 to 3.13 and torch for that Python. It needs no network: if the exporter's
dependencies are not installed, run `make gpu-wheels` on a machine with a network first and copy .gpu-wheels along. The
first GPU is checked; other work on it makes the checks of the load differ.

By default, these parts run: what differed on the first real GPU and was mended, and what no simulation shows.
  faults again        trainings whose finding was wrong, two hangs, and healthy ones that lost time to the power limit
  load again          busy time, its last timestamp and the processes' memory, compared with a known load
  step_cost           microseconds of the hook in a Transformer's steps of 10, 30 and 100 ms, in interleaved blocks
  profiled timing     the device clock's forward, backward and optimizer next to torch.profiler's kernels
  profiled busy       busy seconds next to torch.profiler's kernels
  hook gloo           DDP with two ranks on this GPU over gloo: the clocks of host and device
  commands capture    `rankscope capture` of a run whose kernel spins (absent if there is no such command)
  commands check_node the figures of `rankscope check-node`
  driver_facts mig    GPM of each MIG instance, if MIG is enabled; the mode is never changed
`--only PART …` runs all parts whose name contains a PART (`--only ""`: all, 30 minutes). The others are:
  driver_facts  raw values of what the driver's documentation leaves open; microseconds of each driver call
  load          each metric compared with `nvidia-smi -q -x`, at rest and under load, and with a matrix product, a copy
                and an upload of known length; CPU time, scrape latency and memory of the exporter
  hook          DDP, FSDP2 and a loop by hand with NCCL in a group of one whose communication is slow on the device;
                parameters, microseconds per step and mark
  faults        trainings of a Transformer, by hand, with frameworks and compiled, healthy or with a fault: what the
                exporter finds, and after how many seconds
`--dry-run` runs the parts without a GPU, to see that they run; its figures mean nothing, and it writes no report unless
`--json` names one.

Each part runs in separate processes with a time limit, so that a part that fails or hangs affects no other part. The
report is rewritten after each part, and the output of `nvidia-smi -q -x` is kept next to it, without serial numbers.
The exit status is 0 once there is a report, with any outcome, and 2 without a GPU. Outcomes: `failed` (the check
broke), `differs`, `one side` (only one of both has a value), `measured` (a fact without a reference), `ok`, `absent`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from testing.servers import free_port
from validation.gpu_check import dry_run
from validation.gpu_check.report import Check, write

ROOT = Path(__file__).parents[2]
# The same modules as REQUIRED in rankscope_exporter.__main__, which cannot be imported without them.
REQUIRED = ("pynvml", "prometheus_client", "fastapi", "uvicorn", "httptools", "uvloop", "yaml", "bcrypt")
REPORT = ROOT / "docs" / "measurements" / "gpu_check_again.json"
LEFT_OUT = re.compile(r"\s*<(supported_clocks|serial|pdi)>.*?</\1>", re.DOTALL)
LIMIT = 580.0  # seconds for the default parts together
# The limit of each part in seconds, by its module and arguments.
DEFAULT = {
    "faults again": 175.0,
    "load again": 85.0,
    "step_cost": 150.0,
    "profiled timing": 35.0,
    "profiled busy": 40.0,
    "hook gloo": 35.0,
    "commands capture": 85.0,
    "commands check_node": 60.0,
    "driver_facts mig": 10.0,
}
"""The most wanted first: those at the end get what the others leave of LIMIT."""
OTHERS = {
    "driver_facts": 60.0,
    "load": 220.0,
    **{f"hook {way}": 90.0 for way in ("ddp", "fsdp2", "by_hand", "cost")},
    "faults": 420.0,
}
PARTS = DEFAULT | OTHERS


class NoGpuError(Exception):
    """No GPU was found."""


class WheelsError(Exception):
    """The exporter's dependencies are not installed, and there are no wheels."""


def main() -> int:
    """Return the exit status: 0 once there is a report, 2 with one line on stderr if there can be none."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, formatter_class=style)
    parser.add_argument("--json", type=Path, help="the report; Markdown and XML go next to it")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run the parts whose name contains one")
    parser.add_argument("--dry-run", action="store_true", help="run the parts without a GPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return run_here(options.part)
    names = [name for name in PARTS if any(part in name for part in options.only)] if options.only else [*DEFAULT]
    try:
        with tempfile.TemporaryDirectory() as directory:
            if options.dry_run:
                os.environ.update(dry_run.simulated(Path(directory)))
            unwanted = Path(directory, "report.json")
            run(names, options.json or (unwanted if options.dry_run else REPORT))
    except (NoGpuError, WheelsError) as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    return 0


def run(names: Sequence[str], path: Path) -> None:
    """Run the parts and rewrite the report after each. Raises NoGpuError, WheelsError."""
    limit = LIMIT if set(names) <= set(DEFAULT) else sum(PARTS.values())
    ends, xml = time.monotonic() + limit, nvidia_smi()
    path.with_suffix(".xml").write_text(LEFT_OUT.sub("", xml))
    results: dict[str, list[Check]] = {}
    with tempfile.TemporaryDirectory() as unpacked:
        unpack_wheels(Path(unpacked))
        imported = [str(ROOT), str(ROOT / "exporter"), str(ROOT / "trainer_hooks"), unpacked]
        os.environ["PYTHONPATH"] = os.pathsep.join([*imported, os.environ.get("PYTHONPATH", "")])
        for name in names:
            print(f"gpu-check: {name}", flush=True)
            command = [sys.executable, "-m", "validation.gpu_check", "--part", name]
            seconds = min(PARTS[name], max(0.0, ends - time.monotonic()))
            results[name] = run_part(command, seconds, ranks=2 if "gloo" in name else 1)
            for check in filter(is_wrong, results[name]):
                print(f"  {check.outcome}: {check.about}: {check.ours} ({check.reference}) {check.note}", flush=True)
            write(path, conditions(xml), results)


def is_wrong(check: Check) -> bool:
    """Return whether the terminal shows the check."""
    return check.outcome in ("failed", "differs")


def nvidia_smi() -> str:
    """Return the XML of `nvidia-smi -q -x`. Raises NoGpuError."""
    try:
        ran = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpuError(f"no NVIDIA GPU: {error}") from None
    if ran.returncode or "<gpu " not in ran.stdout:
        raise NoGpuError(f"no NVIDIA GPU: {' '.join((ran.stdout + ran.stderr).split())[:200]}")
    return ran.stdout


def unpack_wheels(directory: Path, folder: Path = ROOT / ".gpu-wheels") -> None:
    """Unpack the wheels if a dependency is not installed: then it can be imported. Raises WheelsError."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    wheels = list((folder / f"{sys.version_info.major}.{sys.version_info.minor}").glob("*.whl"))
    if missing and not wheels:
        raise WheelsError(f"{', '.join(missing)} missing: run `make gpu-wheels` with a network and copy {folder.name}")
    for wheel in wheels if missing else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)


def conditions(xml: str) -> dict[str, str]:
    """Return where and when this was measured."""
    gpu = " driver ".join(re.findall("<(?:product_name|driver_version)>(.*)<", xml)[1::-1])
    machine = f"{platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}, uid {os.geteuid()}"
    return {
        "command": "`make gpu-check`",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{gpu}, {machine}",
        "bound": "each value agrees with `nvidia-smi` or the known load, each fault is found and nothing else",
    }


def run_part(command: Sequence[str], seconds: float, ranks: int = 1) -> list[Check]:
    """Run a part in a process for each rank, and return its checks. Kills processes that do not end in time."""
    with tempfile.TemporaryDirectory() as name:
        directory, ends = Path(name), time.monotonic() + seconds
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        common |= {"RANKSCOPE_RUN_DIR": name, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        started = [start(command, {**common, "RANK": str(rank)}, directory / str(rank)) for rank in range(ranks)]
        ended = [wait(process, ends) for process in started]
        found = [list(collect(directory / str(rank), why)) for rank, why in enumerate(ended)]
    if ranks == 1:
        return found[0]
    return [replace(check, about=f"rank {r}: {check.about}") for r, checks in enumerate(found) for check in checks]


def start(command: Sequence[str], variables: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start a process in its own session, with its output in files, so that a killed part keeps its checks."""
    environment = {**os.environ, **variables, "LOCAL_RANK": variables["RANK"]}
    with output.open("wb") as stdout, output.with_suffix(".err").open("wb") as stderr:
        return subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)


def wait(process: subprocess.Popen[bytes], ends: float) -> str:
    """Wait, kill the process and its session, and return why it failed; empty if it did not."""
    why = "did not end in time"
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(max(0.0, ends - time.monotonic()))
        why = f"exit status {code}" if code else ""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return why


def collect(output: Path, why: str) -> Iterator[Check]:
    """Yield the checks that a process has printed, and one more if it failed."""
    for line in output.read_text(errors="replace").splitlines():
        if line.startswith("{"):  # a library may print something else
            yield Check(**json.loads(line))
    if why:
        errors = output.with_suffix(".err").read_text(errors="replace").strip()
        yield Check("this part", "failed", note=f"{why}. {errors[-500:]}")


def run_here(name: str) -> int:
    """Run a part in this process and print each check as a line of JSON."""
    module, _, argument = name.partition(" ")
    for check in import_module(f"validation.gpu_check.{module}").check(argument):
        print(json.dumps(asdict(check)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
