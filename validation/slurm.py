"""Check that Slurm's jobs are attributed to GPUs, and that a job's report adds up to its wall time and GPUs.

    python -m validation.slurm --save

A real slurmctld and slurmd run the shipped prolog, task prolog and mail program, and two users' jobs at once. Each job
has two ranks, one of which is slow for some of the time. A real exporter and a real Prometheus monitor them. While they
run, each GPU must name its job by number, name, user, account and partition. Afterwards, the report must sum to Slurm's
run time and GPUs, from the exporter's state and from Prometheus. The report takes the time without a training rank from
Slurm, so the part with ranks must match the ranks' own measurement, too: it is between the times with and without the
import of torch, in which the hook starts. A third job opts out.

`--root DIR` also tests the Slurm that testing/unpack_slurm.sh put there. The GPUs are simulated; the jobs name them by
UUID, as CUDA does. This machine has no pure cgroup v2, so processes are in cgroups of version 1.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from deploy.prometheus.shipped import RULES
from prometheus_client.parser import text_string_to_metric_families
from testing import report, servers
from testing.exporter_process import eventually, metrics
from testing.report import ROOT, Check
from testing.slurm_cluster import GPUS, SlurmCluster, is_installed, lines

from rankscope_exporter.simulation import simulated_uuid

WITHIN = 0.01
"""The tolerance of a report's sum, as a ratio."""
INTERVAL = 5  # seconds
SETTLED = 15.0  # seconds after a job until Prometheus has its end
REPORT = [sys.executable, "-m", "rankscope.cli.launch", "report"]


@dataclass(frozen=True)
class Submitted:
    """One job of one user."""

    name: str
    uid: int
    user: str
    account: str
    ranks: int = 2
    opts_out: bool = False

    def options(self, directory: Path) -> list[object]:
        resources = [f"--gres=gpu:{self.ranks}", "--cpus-per-task=2", "-A", self.account, "-J", self.name]
        mail = ["--mail-type=END", "--mail-user", f"{self.user}@example.org"]
        return [*resources, *mail, "-o", directory / "output" / f"{self.name}.log", "-D", directory]


ALICE = Submitted("train large", 65534, "nobody", "physics")
BOB = Submitted("train", 1, "daemon", "biology")
CAROL = Submitted("alone", 65534, "nobody", "physics", ranks=1, opts_out=True)


def python_for_all() -> str | None:
    """Return an interpreter of this version that every user can run: the jobs' users may have no access to this one."""
    return shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin")


def missing_requirement() -> str:
    """Return the missing requirement on this machine; empty if there is none."""
    if not is_installed():
        return "needs root, slurmctld, slurmd and munge: make slurm installs them"
    return "" if python_for_all() else f"needs a Python of version {sys.version_info.minor} in /usr/bin, for all users"


class Node:
    """A node with Slurm, an exporter and a Prometheus, as a context manager."""

    def __init__(self, directory: Path, root: Path | None, seconds: float) -> None:
        self.directory, self.seconds = directory, seconds
        for name, mode in {"run": 0o1777, "state": 0o755, "jobs": 0o755, "output": 0o1777, "mail": 0o755}.items():
            (directory / name).mkdir(mode=0o755)
            (directory / name).chmod(mode)
        directory.chmod(0o755)
        flags = [f"--state-dir={directory / 'state'}", f"--collector.allocation.slurm-dir={directory / 'jobs'}"]
        scenario = {"gpus": GPUS, "follow_ranks": True}
        self.exporter = servers.exporter(directory, scenario, directory / "run", flags=flags)
        self.prometheus = servers.prometheus(directory, self._configuration())
        prolog = self._script("prolog.sh", "gpu_jobs.sh", RANKSCOPE_SLURM_DIR=str(directory / "jobs"))
        self.slurm = SlurmCluster(
            directory / "slurm",
            root,
            Prolog=prolog,
            Epilog=prolog,
            TaskProlog=self._script("task_prolog.sh", "task_prolog.sh", RANKSCOPE_HOOK=str(ROOT / "trainer_hooks")),
            MailProg=self._script("mail.sh", "mail.sh", RANKSCOPE_REPORT_CONFIG=str(self._report_configuration(root))),
        )
        self._running = ExitStack()

    def __enter__(self) -> Node:
        with ExitStack() as starting:
            starting.enter_context(self.slurm)
            for server in (self.exporter, self.prometheus):
                starting.enter_context(server)
            self._running = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def submit(self, job: Submitted) -> str:
        """Queue the job. Return its number."""
        script = self.directory / f"{job.name.replace(' ', '_')}.sh"
        script.write_text(lines(*self._lines(job)))
        script.chmod(0o755)
        return self.slurm.submit(script, *job.options(self.directory), uid=job.uid)

    def _lines(self, job: Submitted) -> Iterator[str]:
        if job.opts_out:
            yield "export RANKSCOPE=0"
        uuids = " ".join(simulated_uuid(gpu) for gpu in range(GPUS))
        yield f"set -- {uuids}; visible="
        yield 'for gpu in $(echo "$SLURM_JOB_GPUS" | tr , " "); do eval "visible=\\$visible,\\${$((gpu + 1))}"; done'
        paths = f'PYTHONPATH="{ROOT}:{sysconfig.get_path("purelib")}:$PYTHONPATH"'
        run = f"HOME=/tmp OMP_NUM_THREADS=1 RANKSCOPE_RUN_DIR={self.directory / 'run'} {paths}"
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={job.ranks} -m testing.slurm_job"
        started = f"{python_for_all()} -W ignore {torchrun} {self.directory / 'output'} {self.seconds}"
        yield f'exec env CUDA_VISIBLE_DEVICES="${{visible#,}}" {run} {started}'

    def _script(self, name: str, shipped: str, **variables: str) -> Path:
        """Return a script that runs the shipped one with these variables: Slurm passes none to it."""
        script = self.directory / name
        exports = [f"export {variable}={value}" for variable, value in variables.items()]
        script.write_text(lines(*exports, f'exec {ROOT / "deploy/slurm" / shipped} "$@"'))
        script.chmod(0o755)
        return script

    def _report_configuration(self, root: Path | None) -> Path:
        mail, path = self.directory / "mail_program.sh", self.directory / "report.conf"
        received = f"{self.directory}/mail/$SLURM_JOB_ID"
        mail.write_text(lines(f'{{ printf "%s\\n" "$@"; cat; }} > {received}.new; mv {received}.new {received}'))
        mail.chmod(0o755)
        command = " ".join([*REPORT, f"--state-dir={self.directory / 'state'}"])
        # Where an installed Slurm finds its configuration and its commands.
        found = f"export SLURM_CONF={self.directory}/slurm/slurm.conf PATH={f'{root}/usr/bin:' if root else ''}$PATH"
        path.write_text(f'{found}\nREPORT="{command}"\nMAIL={mail}\nWAIT=5\n')
        return path

    def _configuration(self) -> str:
        return yaml.safe_dump(
            {
                "global": {"scrape_interval": f"{INTERVAL}s", "evaluation_interval": f"{INTERVAL}s"},
                "rule_files": [str(RULES)],
                "scrape_configs": [{"job_name": "rankscope", "static_configs": [{"targets": [self.exporter.address]}]}],
            }
        )

    def allocations(self) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of each allocated GPU by index."""
        text = "\n".join(metrics(self.exporter.url)) + "\n"
        return {
            sample.labels["gpu"]: sample.labels
            for family in text_string_to_metric_families(text)
            if family.name == "rankscope_gpu_allocation_info"
            for sample in family.samples
        }

    def report(self, *options: str) -> str:
        done = subprocess.run(
            [*REPORT, *options], capture_output=True, text=True, env=self.slurm.environment(), check=False
        )
        return done.stdout or done.stderr

    def rank_seconds(self, number: str) -> tuple[float, float]:
        """Return the seconds of all ranks of the job, by their own clocks: without the import of torch, and with it."""
        files = sorted((self.directory / "output").glob(f"{number}.*.json"))
        ended = sum(float(file.with_suffix(".end").read_text()) for file in files)
        ranks = [json.loads(file.read_text()) for file in files]
        return ended - sum(one["imported"] for one in ranks), ended - sum(one["began"] for one in ranks)


def check_attribution(node: Node, jobs: Mapping[str, Submitted]) -> Iterator[Check]:
    """Yield whether each GPU names its job while all jobs train."""
    trained = Counter({(job.name, number): job.ranks for number, job in jobs.items()})
    eventually(lambda: Counter(map(_named, node.allocations().values())) >= trained, 120.0)
    held = node.allocations()
    for number, job in jobs.items():
        own = [labels for labels in held.values() if labels["slurm_job_id"] == number]
        expected = {
            "slurm_job_name": job.name,
            "user": job.user,
            "slurm_account": job.account,
            "slurm_partition": "gpu",
            "run": f"{job.name}-{number}",
            "owner": str(job.uid),
        }
        named = {tuple(labels[name] for name in expected) for labels in own}
        holds = len(own) == job.ranks and named == {tuple(expected.values())}
        found = "; ".join(", ".join(one) for one in named)
        yield Check(
            f"{job.ranks} GPUs name job {job.name!r} of {job.user}", holds, f"{len(own)} GPUs: {number}, {found}"
        )


def _named(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels["slurm_job_name"], labels["slurm_job_id"]


def check_reports(node: Node, number: str, job: Submitted) -> Iterator[Check]:
    """Yield whether a job's reports add up after its end."""
    shown = node.slurm.show(number)
    hours, minutes, seconds = map(int, shown["RunTime"].split(":"))
    whole = job.ranks * (3600 * hours + 60 * minutes + seconds)
    least, most = node.rank_seconds(number)
    for source in (f"--state-dir={node.directory / 'state'}", f"--url={node.prometheus.url}"):
        name = source.partition("=")[0].removeprefix("--")
        text = node.report(source, "--slurm-job", number, "--owner", str(job.uid), "--json")
        found: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
        total = 3600 * found.get("gpu_hours", 0.0)
        parts = found.get("useful", 0.0) + sum(found.get("lost", {}).values())
        trained = total * (1.0 - found.get("lost", {}).get("no_rank", 0.0))
        holds = least * (1.0 - WITHIN) <= trained <= most * (1.0 + WITHIN)
        yield from (
            Check(f"{job.name}, {name}: parts sum to 1", abs(parts - 1.0) < 1e-6, f"{parts:.4f}"),
            Check(
                f"{job.name}, {name}: run time x GPUs", _is_near(total, whole), f"{total:.1f} of {whole} GPU-seconds"
            ),
            Check(f"{job.name}, {name}: with ranks", holds, f"{trained:.1f} of {least:.1f} to {most:.1f}"),
            Check(f"{job.name}, {name}: fits an AdminComment", len(text) <= 1024, f"{len(text)} bytes"),
        )


def _is_near(value: float, truth: float) -> bool:
    return abs(value - truth) <= WITHIN * truth


def check_mail_and_opt_out(node: Node, jobs: Mapping[str, Submitted]) -> Iterator[Check]:
    """Yield whether the report is mailed, names the straggler, is hidden from other users, and opting out works."""
    number, job = next(iter(jobs.items()))
    eventually(lambda: (node.directory / "mail" / number).exists(), 60.0)
    time.sleep(1.0)
    mail = (node.directory / "mail" / number).read_text()
    yield Check(
        "the mail has the report", f"Slurm job {number} ({job.name}) of {job.user}" in mail, mail.splitlines()[1]
    )
    yield Check("the report names the slow rank", "Rank 1 (" in mail, _finding(mail))
    denied = node.report(f"--state-dir={node.directory / 'state'}", "--slurm-job", number, "--owner", "2")
    yield Check("another user does not see the report", "no data" in denied, denied[:80])
    by = node.report(f"--url={node.prometheus.url}", "--by=account", "--days=0.02")
    known = all(one.account in by for one in jobs.values())
    yield Check("GPU-hours by account", known, " / ".join(by.splitlines()[2:4]))
    alone = node.submit(CAROL)
    node.slurm.wait_for(alone, "COMPLETED", "FAILED", within=node.seconds + 90)
    records = [*(node.directory / "run").glob(f"alone-{alone}.*")]
    trained = node.rank_seconds(alone)[0] > 0.0
    yield Check("a job that opts out trains and leaves no record", trained and not records, f"{len(records)} records")


def _finding(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if "Rank 1 (" in line), "none")


def measure(directory: Path, root: Path | None, seconds: float) -> tuple[str, list[Check], str]:
    """Return Slurm's version, the checks, and a report as printed."""
    with Node(directory, root, seconds) as node:
        jobs = {node.submit(job): job for job in (ALICE, BOB)}
        checks = [*check_attribution(node, jobs)]
        for number in jobs:
            node.slurm.wait_for(number, "COMPLETED", "FAILED", within=seconds + 120)
        time.sleep(SETTLED)
        for number, job in jobs.items():
            checks += check_reports(node, number, job)
        checks += check_mail_and_opt_out(node, jobs)
        page = node.report(f"--state-dir={directory / 'state'}", "--slurm-job", next(iter(jobs)), "--price=2.5")
        return node.slurm.version, checks, page


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and publish. Return 1 if a check does not hold."""
    parser = report.parser(__doc__)
    parser.add_argument("--root", type=Path, action="append", default=[], help="directory of another, unpacked Slurm")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of training (default: %(default)s)")
    options = parser.parse_args(arguments)
    if missing := missing_requirement():
        parser.exit(2, f"{missing}\n")
    body, figures, holds = [], [], True
    for root in (None, *options.root):
        with tempfile.TemporaryDirectory(prefix="rankscope-slurm-", dir="/dev/shm") as name:
            version, checks, page = measure(Path(name), root, options.seconds)
        body += [f"## Slurm {version}", report.verdict(checks), f"A report:\n\n```\n{page}```"]
        figures.append({"version": version, "checks": [vars(check) for check in checks]})
        holds &= all(check.holds for check in checks)
    title = "Slurm's jobs and their reports"
    report.Report("slurm", title, __doc__, f"{WITHIN:.0%}", body, figures).publish(options.save)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
