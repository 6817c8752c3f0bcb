"""The node: a victim's job, the exporter, a Prometheus and a scraper, each a process, and the attackers."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bcrypt
import yaml
from deploy.prometheus import fast
from testing import servers
from testing.authority import Authority
from testing.job.launch import JobError, TrainingJob
from validation.siege.attack import ALL, BURN
from validation.siege.clients import basic
from validation.siege.interpreter import ROOT, as_user, environment, for_user
from validation.siege.target import ATTACKER, EXPORTER, GPUS, INSIDER, RANKS, RUN, VICTIM, Target, any_server

HOST = "192.0.2.1"
"""The address of Prometheus and the exporter; 192.0.2.0/24 is reserved for examples."""
SCRAPER = "192.0.2.2"
SOURCES = "192.0.2.{}"
ENDS_WITHIN = 30.0  # seconds
Report = dict[str, Any]


class AuthenticatedServer(servers.Server):
    """A server that reports with a password whether it is ready."""

    header = ""

    def _is_ready(self) -> bool:
        request = urllib.request.Request(self.url + self.ready, headers={"Authorization": self.header})
        try:
            with urllib.request.urlopen(request, timeout=1, context=any_server()) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class VictimJob(TrainingJob):
    """The training job of another user, in its own session: two ranks, with steps of about 50 ms, mostly slept.

    It writes a checkpoint every twenty seconds, because a run without any alerts after a while.
    """

    ranks = RANKS

    def command(self) -> list[str]:
        """Return torchrun's command line, with a Python that the user can start."""
        return in_own_session(as_user(VICTIM, for_user(VICTIM), *super().command()[1:]))

    def environment(self) -> dict[str, str]:
        """Return the job's environment variables in addition to those of this process."""
        return {**super().environment(), "HOME": str(self.output.parent), "GLOO_SOCKET_IFNAME": "lo"}


class Node:
    """All processes of the node, as a context manager. `directory` is for logs, `memory` is on a tmpfs."""

    def __init__(self, directory: Path, memory: Path, *, tls: bool) -> None:
        self.directory = directory
        self.scrapes = directory / "scrapes.jsonl"
        self._job, self.state = memory / "job", memory / "state"
        self._python = for_user(VICTIM)
        self._password = secrets.token_hex(8)
        self.target = Target(str(memory / "ranks"), str(memory / "closed"), HOST, servers.free_port(), SCRAPER, tls)
        self._scheme = "https" if tls else "http"

    def __enter__(self) -> Node:
        os.environ |= environment()  # for all processes started here
        with ExitStack() as started:
            self._make_directories()
            self.job = started.enter_context(self._training())
            exporter = started.enter_context(self._exporter())
            assert exporter.pid
            self.exporter_pid = exporter.pid
            self.prometheus = started.enter_context(self._prometheus())
            started.enter_context(self._scraper())
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    @contextmanager
    def attacked(self, attackers: Mapping[str, Target]) -> Iterator[dict[str, Report]]:
        """Run these attackers in the block. Afterwards the yielded dict has the report of each."""
        reports: dict[str, Report] = {}
        processes: dict[str, subprocess.Popen[str]] = {}
        with (self.directory / "attackers.log").open("a") as log:
            try:
                for name, target in attackers.items():
                    command = [self._python, "-m", "validation.siege.attack"]
                    command += [BURN if target.share else name, json.dumps(asdict(target))]
                    processes[name] = subprocess.Popen(
                        as_user(ALL[name].uid, *command), stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT
                    )
                for process in processes.values():
                    assert process.stdout is not None
                    process.stdout.readline()
                yield reports
            finally:
                for process in processes.values():
                    process.terminate()
                for name, process in processes.items():
                    output = _final_output(process)
                    reports[name] = json.loads(output) if output else {"cpu": 0.0, "seconds": 0.0, "seen": {}}

    def targets(self, names: Sequence[str]) -> dict[str, Target]:
        """Return each attacker's target, with its own source address."""
        return {name: replace(self.target, source=SOURCES.format(10 + number)) for number, name in enumerate(names)}

    def _make_directories(self) -> None:
        for path, owner, mode in (
            (Path(self.target.run_dir), 0, 0o1777),
            (Path(self.target.closed_dir), ATTACKER, 0o755),
            (self._job, VICTIM, 0o755),
            (self.state, EXPORTER, 0o755),
        ):
            path.mkdir()
            os.chown(path, owner, owner)
            path.chmod(mode)

    @contextmanager
    def _training(self) -> Iterator[VictimJob]:
        job = VictimJob(self._job, RUN, Path(self.target.run_dir))
        job.start(forward=15, backward=30, checkpoint_every=400, checkpoint=0)
        try:
            job.wait_until_training()
            yield job
            if not job.is_running():
                raise JobError(f"the job has ended\n{job.last_output()}")
        finally:
            job.terminate()

    def _exporter(self) -> servers.Server:
        busy = {n: [{"at": 0, "busy": 0.9, "processes": [{"pid": self.job.pid(n)}]}] for n in range(RANKS)}
        scenario = self._write_config("scenario.yml", {"gpus": GPUS, "timeline": busy})
        users = {"prometheus": self._password, INSIDER[0]: INSIDER[1]}
        hashes = {user: bcrypt.hashpw(word.encode(), bcrypt.gensalt(10)).decode() for user, word in users.items()}
        sections: dict[str, Any] = {"basic_auth_users": hashes}
        if self.target.tls:
            sections["tls_server_config"] = self._certificate()
        web = self._write_config("web.yml", sections)
        command = [self._python, "-m", "rankscope_exporter", f"--web.listen-address={HOST}:{self.target.port}"]
        command += [f"--run-dir={self.target.closed_dir}", f"--run-dir={self.target.run_dir}"]
        command += [f"--simulate={scenario}", f"--web.config.file={web}", f"--state-dir={self.state}"]
        log = self.directory / "exporter.log"
        server = AuthenticatedServer(
            "exporter", in_own_session(as_user(EXPORTER, *command)), f"{self._scheme}://{HOST}:{self.target.port}", log
        )
        server.header = basic("prometheus", self._password).decode().partition(": ")[2]
        return server

    def _prometheus(self) -> servers.Prometheus:
        config = yaml.safe_load(fast.prometheus_config([f"{HOST}:{self.target.port}"]))
        for scraped in config["scrape_configs"]:
            scraped |= {"scheme": self._scheme, "tls_config": {"insecure_skip_verify": True}}
            scraped["basic_auth"] = {"username": "prometheus", "password": self._password}
        return servers.prometheus(self.directory, yaml.safe_dump(config, sort_keys=False))

    @contextmanager
    def _scraper(self) -> Iterator[None]:
        command = [sys.executable, "-m", "validation.siege.scraper", self._scheme, HOST, str(self.target.port), SCRAPER]
        with self.scrapes.open("w") as file:
            process = subprocess.Popen(in_own_session([*command, "prometheus", self._password]), stdout=file, cwd=ROOT)
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def _certificate(self) -> dict[str, str]:
        """Issue the exporter's certificate, and return the paths for its web configuration."""
        paths = Authority(self.directory).issue("server", "localhost")
        for path in paths:
            os.chown(path, EXPORTER, EXPORTER)
        return dict(zip(("cert_file", "key_file"), map(str, paths), strict=True))

    def _write_config(self, name: str, document: object) -> Path:
        """Write a file that only the exporter may read."""
        path = self.directory / name
        path.write_text(yaml.safe_dump(document))
        path.chmod(0o600)
        os.chown(path, EXPORTER, EXPORTER)
        return path


def in_own_session(command: Sequence[str]) -> list[str]:
    """Return the command in its own session: the kernel divides CPUs among sessions, as among users and services."""
    return ["setsid", *command]


def _final_output(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return output.strip()


def sleep_until(moment: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, moment - time.monotonic()))
