"""Let real ranks hang in eight ways, and check what the exporter captures of them and that the job goes on unharmed.

    python -m validation.hang_captures --save

Three ranks train with DistributedDataParallel, over gloo or on the asynchronous device (testing/hanging_job.py). The
last one hangs: in a collective, before it, in a loader worker, in a filter that accepts no sample, in a read of storage
that does not answer, by SIGSTOP, with the GIL held by C code, or it is killed. A real exporter with the thresholds as
shipped captures the run. Its first sentence must name the rank and the reason. Then the hang ends, and the job trains
to its end: the digests of its parameters must be those of a job that has not hung and was not captured. A job whose
rank was killed does not go on.

Meanwhile another job trains alone, of another user if this program is root: nothing asks it for its stacks, and no
capture contains its name. Seconds depend on the load: the machine and the capturing process have other work, and the
latter runs at idle priority.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing import report
from testing.exporter_process import exporter_process
from testing.hanging_job import KINDS, PIPE, RELEASE
from testing.job.device import DEVICES
from testing.report import Line, table, yes_or_no
from testing.servers import directories, free_port
from testing.stack import wait_for
from testing.users import NOBODY

from rankscope.process.stack_dump import MEMORY_FILE
from rankscope_exporter.capture.folder import FIGURES
from rankscope_exporter.simulation import simulated_uuid

RANKS = 3
CAPTURED_WITHIN, ENDS_WITHIN = 300.0, 180.0
STARTED_WITHIN = 120.0
NOT_HUNG = "none"
SAYS: Mapping[str, str] = {
    "inside": r"stuck in (collective_wait|device_wait)",
    "before": r"hanging_job\.py:\d+ in (wait|is_released)\b",
    "loader": r"waits for its loader worker",
    "filter": r"stuck in data_wait .*hanging_job\.py:\d+ in (__iter__|_accepts|is_due|is_released)",
    "storage": rf"waits in a read of \S*{re.escape(PIPE)}",
    "dead": r"was killed",
    "gil": r"in hold_gil .*waiting for the GIL",
    "stopped": r"is stopped",
}
"""By kind of hang: the reason, as the first sentence must say it."""
NAMES = rf"Rank {RANKS - 1} \("
BYSTANDER = "bystander"
BYSTANDER_CODE = """
import os, sys, time
import torch
import rankscope, rankscope.announcements, rankscope.publication
import testing.users
rankscope.instrument()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.geteuid() == 0:
    testing.users.become(int(sys.argv[1]))
while True:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
"""
"""It imports everything first: another user may be unable to enter the directory of the interpreter."""


@dataclass
class HangingJob:
    """One job, as processes without a launcher, which would end the other ranks with the first one."""

    directory: Path
    run_dir: Path
    device: str
    kind: str

    def __post_init__(self) -> None:
        self.run = f"{self.kind}-{self.device}"
        self.directory.mkdir()
        os.mkfifo(self.directory / PIPE)
        self._port, first = free_port(), RANKS * DEVICES.index(self.device)
        self._uuids = ",".join(simulated_uuid(first + rank) for rank in range(RANKS))
        self.ranks = [self._start(rank) for rank in range(RANKS)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "OMP_NUM_THREADS": 1,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._port, "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": self._uuids, "RANKSCOPE": int(self.device == "gloo"), "RANKSCOPE_RUN": self.run,
            "RANKSCOPE_RUN_DIR": self.run_dir,
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "testing.hanging_job", self.directory, self.device, self.kind]
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        with (self.directory / f"output-{rank}.log").open("wb") as output:
            return subprocess.Popen([*map(str, command)], env=environment, stdout=output, stderr=output)

    def release(self) -> None:
        """End the hang."""
        (self.directory / RELEASE).touch()
        with suppress(ProcessLookupError):
            os.kill(self.ranks[-1].pid, signal.SIGCONT)
        descriptor = os.open(self.directory / PIPE, os.O_RDWR)  # stays open, so that the byte is not lost
        os.write(descriptor, b".")
        wait_for(lambda: all(one.poll() is not None for one in self.ranks), ENDS_WITHIN)
        os.close(descriptor)

    def digests(self) -> list[str]:
        """Return the digest of each rank that has trained to the end."""
        return [path.read_text() for path in sorted(self.directory.glob("digest-*"))]

    def kill(self) -> None:
        for one in self.ranks:
            one.kill()
            one.wait()


def observe(jobs: Mapping[str, HangingJob], captures: Path, references: Mapping[str, list[str]]) -> Iterator[Line]:
    """Yield the captures of jobs that hang in the same way, by device, and how they went on."""
    for device, job in jobs.items():
        found = captured(captures, job.run)
        job.release()
        sentence = str(found.get("sentence", "no capture")).replace(str(job.directory.parent), "DIR")
        yield {
            "id": job.run,
            "kind": job.kind,
            "device": device,
            "sentence": sentence,
            **{name: found.get(name) for name in ("reason", "bytes", "seconds", "cpu_seconds")},
            "named": bool(re.match(NAMES, sentence) and re.search(SAYS[job.kind], sentence)),
            "unharmed": None if job.kind == "dead" else job.digests() == references[device],
        }


def captured(captures: Path, run: str) -> Mapping[str, Any]:
    """Return the figures of the run's first capture; none if there is none in time."""
    paths = captures.glob(f"{run}-*/{FIGURES}")
    wait_for(lambda: any(captures.glob(f"{run}-*/{FIGURES}")), CAPTURED_WITHIN)
    found: Mapping[str, Any] = json.loads(min(paths).read_text()) if any(captures.glob(f"{run}-*")) else {}
    return found


@contextmanager
def bystander(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job of another user, or of this one without root."""
    environment = {**os.environ, "RANKSCOPE_RUN": BYSTANDER, "RANKSCOPE_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BYSTANDER_CODE, str(NOBODY)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            assert wait_for(lambda: any(run_dir.glob(f"{BYSTANDER}*")), STARTED_WITHIN), "the bystander does not train"
            yield process
        finally:
            process.kill()


def bytes_of_stacks(pid: int) -> int:
    """Return how much the hook of a process has written as an answer; each answer stays in its file in memory."""
    files = (one for one in Path(f"/proc/{pid}/fd").iterdir() if MEMORY_FILE in str(one.readlink()))
    return sum(one.stat().st_size for one in files)


@contextmanager
def hanging(directory: Path, run_dir: Path, kind: str) -> Iterator[Mapping[str, HangingJob]]:
    """Run a job on each kind of device, which hang in the same way."""
    jobs = {device: HangingJob(directory / f"{kind}-{device}", run_dir, device, kind) for device in DEVICES}
    try:
        yield jobs
    finally:
        for job in jobs.values():
            job.kill()


def reference(job: HangingJob) -> list[str]:
    """Return the digests of a job that does not hang."""
    job.release()
    assert len(job.digests()) == RANKS, (job.directory / "output-0.log").read_text()
    return job.digests()


def measure(directory: Path, memory: Path, kinds: list[str]) -> dict[str, Any]:
    """Return the lines of all jobs, and what happened to the bystander."""
    run_dir, captures = memory / "run", directory / "captures"
    run_dir.mkdir()
    run_dir.chmod(0o1777)
    memory.chmod(0o711)
    captures.mkdir(mode=0o711)
    flags = [f"--run-dir={run_dir}", f"--simulate={RANKS * len(DEVICES)}", f"--capture-dir={captures}", "--node=node-a"]
    lines: list[Line] = []
    with ExitStack() as stack:
        log = stack.enter_context((directory / "exporter.log").open("w"))
        stack.enter_context(exporter_process(free_port(), *flags, stderr=log))
        other = stack.enter_context(bystander(run_dir))
        with hanging(directory, run_dir, NOT_HUNG) as jobs:
            references = {device: reference(job) for device, job in jobs.items()}
        for kind in kinds:
            with hanging(directory, run_dir, kind) as jobs:
                lines += observe(jobs, captures, references)
            print(*(line["sentence"] for line in lines[-len(DEVICES) :]), sep="\n", file=sys.stderr)
        texts = [path for path in captures.rglob("*.txt") if BYSTANDER in path.read_text(errors="replace")]
        figures = {
            "is_another_user": os.geteuid() == 0,
            "trains": other.poll() is None,
            "bytes_of_stacks": bytes_of_stacks(other.pid),
            "named_in": len(texts),
        }
    return {"jobs": lines, "bystander": figures}


def body(figures: Mapping[str, Any]) -> list[str]:
    """Return the tables."""
    rows = [
        (
            line["kind"],
            line["device"],
            line["sentence"],
            yes_or_no(line["named"]),
            "" if line["bytes"] is None else f"{line['bytes'] / 1024:.0f} KiB",
            "" if line["seconds"] is None else f"{line['seconds']:.1f} s",
            "" if line["cpu_seconds"] is None else f"{line['cpu_seconds']:.2f} s",
            "ended" if line["unharmed"] is None else yes_or_no(line["unharmed"]),
        )
        for line in figures["jobs"]
    ]
    head = (
        "hang",
        "device",
        "first sentence",
        "names rank and reason",
        "size",
        "seconds",
        "CPU",
        "bit-identical after it",
    )
    other = figures["bystander"]
    checks = [
        report.Check(
            "the other job trains on", other["trains"], "another user's" if other["is_another_user"] else "own"
        ),
        report.Check("it was not asked for stacks", not other["bytes_of_stacks"], f"{other['bytes_of_stacks']} bytes"),
        report.Check("no capture has its name", not other["named_in"], f"{other['named_in']} files"),
    ]
    return [table(head, rows), report.verdict(checks)]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=[*KINDS], help="default: all")
    options = parser.parse_args()
    with directories("captures") as (directory, memory):
        directory.chmod(0o711)
        figures = measure(directory, memory, options.kinds)
    bound = "every first sentence names the rank and the reason, and every job that goes on is bit-identical"
    title = "Captures of runs that hang"
    report.Report("hang_captures", title, __doc__, bound, body(figures), figures, ["torch"]).publish(options.save)


if __name__ == "__main__":
    main()
