"""Check `rankscope report` of a hang that lasts, of one that has ended and of a crash, against the jobs' own clocks.

    python -m validation.job_reports --save

Three jobs of two ranks train at the same time on one node. In two of them rank 1 hangs, and in one of these it goes on
after a while; in the third it is killed. A real exporter monitors them, and two Prometheus scrape it, each at its own
interval. Each report is made from the exporter's state and journal, and from each Prometheus. The truth is in the jobs'
own clocks: when each rank's script began, its last step before the hang, and when the launcher let it go on, killed it
or saw that the last rank's process had ended. The GPUs are simulated, and the device's time is slept.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from testing import report, servers
from testing.job.launch import JobError, TrainingJob
from testing.report import Line
from testing.stack import wait_for
from validation.lost_gpu_hours import prometheus

from rankscope.cli.explaining.prometheus import Prometheus
from rankscope_exporter.job_report import queries, saved
from rankscope_exporter.job_report.job import Job, select_job
from rankscope_exporter.simulation import simulated_uuid

RANKS = 2
INTERVALS = (5, 15)  # seconds
TRAINS, HANGS, GOES_ON = 60.0, 150.0, 60.0  # seconds
BOUND = 0.03
Figures = dict[str, float]


class Scene(TrainingJob):
    """A job on its own GPUs, with the times of its fault in unix time."""

    ranks = RANKS

    def __init__(self, directory: Path, run: str, run_dir: Path, first_gpu: int) -> None:
        super().__init__(directory / run, run, run_dir)
        self._first_gpu = first_gpu
        self.hung = self.healed = self.killed = self.ended = 0.0

    def environment(self) -> dict[str, str]:
        uuids = [simulated_uuid(self._first_gpu + rank) for rank in range(RANKS)]
        return {**super().environment(), "CUDA_VISIBLE_DEVICES": ",".join(uuids)}

    def hang(self) -> None:
        """Let rank 1 hang after a step."""
        self._control.ranks[1] = {"hangs": True}
        self._write(waits=False)

    def wait_for_ranks(self) -> None:
        """Wait until no rank's process is left, which is before torchrun's own end."""
        pids = [self.pid(rank) for rank in range(RANKS)]
        if not wait_for(lambda: not any(map(is_process_alive, pids)), HANGS):
            raise JobError(f"{self.run} does not end\n{self.last_output()}")
        self.ended = time.time()

    def stop(self) -> None:
        """Let all ranks end normally."""
        self._control.common = {"stops": True}
        self._write(waits=False)
        self.wait_for_ranks()

    def go_on(self) -> None:
        self._control.ranks[1] = {}
        self._write(waits=False)
        self.healed = time.time()

    def truth(self, until: float) -> Figures:
        """Return the GPU seconds, and the length of the hang, until a time."""
        ends = [self.ended or until, self.killed or self.ended or until]
        whole = sum(end - self.began(rank) for rank, end in enumerate(ends))
        if self.killed:
            return {"GPU seconds": whole + self.ended - self.killed}
        steps = self.progress.read_steps()
        hang = max(seconds for _, seconds in steps) if self.healed else until - steps[-1][0]
        return {"GPU seconds": whole, "GPU seconds of stall": RANKS * hang, "seconds of the finding": hang}


def is_process_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def reported(job: Job) -> Figures:
    """Return a report's figures by the names of the truth's."""
    hang = next((one for one in job.findings if one.kind == "hang"), None)
    return {
        "GPU seconds": job.gpu_seconds,
        "GPU seconds of stall": job.causes.get("stall", 0.0),
        "seconds of the finding": (hang.end or job.at) - hang.begin if hang else 0.0,
    }


def play(lasting: Scene, ended: Scene, crash: Scene) -> None:
    """Run the scenes, until the lasting hang is all that is left."""
    for one in (lasting, ended, crash):
        one.start()
    for one in (lasting, ended, crash):
        one.wait_until_training()
    time.sleep(TRAINS)
    lasting.hang()
    ended.hang()
    crash.killed = crash.kill(1)
    crash.wait_for_ranks()
    time.sleep(HANGS)
    ended.go_on()
    time.sleep(GOES_ON)
    ended.stop()
    time.sleep(2 * max(INTERVALS))


def measure(directory: Path) -> Iterator[Line]:
    """Yield the figures of each scene in each report, next to the truth."""
    run_dir, state = directory / "run", directory / "state"
    for made in (run_dir, state):
        made.mkdir()
    scenario = {"gpus": 3 * RANKS, "follow_ranks": True}
    exporter = servers.exporter(directory, scenario, run_dir, flags=[f"--state-dir={state}"])
    databases = {each: prometheus(directory / f"{each}s", each, exporter.address) for each in INTERVALS}
    names = ("lasting-hang", "ended-hang", "crash")
    scenes = [Scene(directory, name, run_dir, RANKS * number) for number, name in enumerate(names)]
    with ExitStack() as running:
        for server in (exporter, *databases.values()):
            running.enter_context(server)
        for scene in scenes:
            running.callback(scene.terminate)
        play(*scenes)
        for scene in scenes:
            journal = select_job(saved.jobs(state), scene.run, None, None)
            yield compare(scene, "journal", journal, journal)
            for each, database in databases.items():
                yield compare(scene, f"--url, each {each} s", by_url(database.url, scene.run), journal)


def by_url(url: str, run: str) -> Job:
    """Return the report on a run from a Prometheus."""
    return queries.job(lambda at: Prometheus(url, at), run, None, None)


def compare(scene: Scene, source: str, job: Job, journal: Job) -> Line:
    """Return a report's figures with the scene's own, and whether its words are those of the journal."""
    truth, found = scene.truth(job.at), reported(job)
    words, others = ([(one.severity, one.sentence) for one in each.findings] for each in (job, journal))
    return {
        "scene": scene.run,
        "source": source,
        "figures": {name: (value, found[name]) for name, value in truth.items()},
        "sentences": [sentence for _, sentence in words],
        "is_same": words == others != [],
    }


def rows(line: Line) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a table: one for each figure."""
    for name, (truth, found) in line["figures"].items():
        error = f"{100 * (found / truth - 1):+.1f}%"
        yield line["scene"], line["source"], name, f"{truth:.1f}", f"{found:.1f}", error


def is_right(line: Line) -> bool:
    """Return whether all figures are within the bound, and the words those of the journal."""
    return line["is_same"] and all(abs(found / truth - 1) <= BOUND for truth, found in line["figures"].values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and publish. Return 1 if a report is wrong."""
    options = report.parser(__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rankscope-report-", dir="/dev/shm") as name:
        lines = [*measure(Path(name))]
    figures = report.table(
        ("scene", "report from", "figure", "by the job's clocks", "in the report", "error"),
        [row for line in lines for row in rows(line)],
    )
    words = report.table(
        ("scene", "report from", "findings", "as in the journal"),
        [
            (line["scene"], line["source"], "; ".join(line["sentences"]), report.yes_or_no(line["is_same"]))
            for line in lines
        ],
    )
    title = "Reports of hangs and of a crash"
    report.Report("job_reports", title, __doc__, f"{BOUND:.0%}", [figures, words], lines).publish(options.save)
    return int(not all(map(is_right, lines)))


if __name__ == "__main__":
    sys.exit(main())
