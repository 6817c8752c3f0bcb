"""Exporter, Prometheus and Alertmanager as child processes on loopback, for the demo and the end-to-end tests.

With the variable `DATABASE=victoria-metrics`, VictoriaMetrics and vmalert take the place of Prometheus.

Each runs until its context ends. They leave only log files in the caller's directory.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import yaml

READY_WITHIN = 30.0  # seconds; each needs less than one on an idle machine
STOPPED_WITHIN = 10.0
SNAPSHOTS = "--data.maintenance-interval=15s"
"""Alertmanager's interval of writing its notification log, as in docker-compose.yml."""


@contextmanager
def directories(name: str) -> Iterator[tuple[Path, Path]]:
    """Yield a directory for the servers' files, and one in memory for the ranks' records."""
    prefix = f"rankscope-{name}-"
    with TemporaryDirectory(prefix=prefix) as directory, TemporaryDirectory(prefix=prefix, dir="/dev/shm") as memory:
        yield Path(directory), Path(memory)


def free_port() -> int:
    """Return a port of the loopback interface that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(*names: str) -> str:
    """Return the first of these programs on the PATH. Raises FileNotFoundError, naming what to install."""
    for name in names:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(f"{names[0]} is not on the PATH; `make servers` installs it")


@dataclass
class Server:
    """One child process that reports over HTTP when it is ready."""

    name: str
    arguments: Sequence[str]
    url: str
    log: Path
    ready: str = "/-/ready"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server and wait until it is ready. Raises RuntimeError with the end of its log if it is late."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.arguments, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_WITHIN
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                words = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
                raise RuntimeError(f"{self.name} did not become ready; its log {self.log} ends:\n{words}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server, with SIGKILL if it does not end."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOPPED_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the server like a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def signal(self, number: int) -> None:
        """Send the server a signal that does not end it."""
        assert self._process is not None
        self._process.send_signal(number)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready, timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Prometheus(Server):
    """A Prometheus server that can be queried."""

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current instant vector of a PromQL expression. Raises ValueError with Prometheus' message."""
        question = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{question}", timeout=10) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from error
        return result

    def rule_errors(self) -> dict[str, str]:
        """Return the last errors of failing rules by name: an alert among them cannot fire."""
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        return {rule["name"]: rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")}


class VictoriaMetrics(Prometheus):
    """A VictoriaMetrics server and the vmalert that evaluates its rules."""

    vmalert: Server

    def start(self) -> None:
        super().start()
        self.vmalert.start()

    def stop(self) -> None:
        self.vmalert.stop()
        super().stop()

    def rule_errors(self) -> dict[str, str]:
        return Prometheus.rule_errors(Prometheus("vmalert", (), self.vmalert.url, self.vmalert.log))


def exporter(
    directory: Path,
    simulate: str | Mapping[str, Any],
    run_dir: Path,
    name: str = "exporter",
    flags: Sequence[str] = (),
    module: Sequence[str] = ("rankscope_exporter",),
) -> Server:
    """Return an exporter for the ranks in `run_dir`, with simulated GPUs. `module` runs it, with its own arguments.

    `simulate` is the value of the flag, or a scenario.
    """
    if not isinstance(simulate, str):
        (directory / f"{name}.yml").write_text(yaml.safe_dump(simulate))
        simulate = str(directory / f"{name}.yml")
    port = free_port()
    arguments = [sys.executable, "-m", *module, f"--web.listen-address=127.0.0.1:{port}"]
    arguments += [f"--run-dir={run_dir}", f"--simulate={simulate}", *flags]
    return Server(name, arguments, f"http://127.0.0.1:{port}", directory / f"{name}.log")


def analyzer(directory: Path, targets: Sequence[str], flags: Sequence[str] = (), name: str = "analyzer") -> Server:
    """Return an analyzer of the runs that span these exporters."""
    port = free_port()
    arguments = [sys.executable, "-m", "rankscope_exporter", f"--web.listen-address=127.0.0.1:{port}"]
    arguments += [f"--analyze={','.join(targets)}", *flags]
    return Server(name, arguments, f"http://127.0.0.1:{port}", directory / f"{name}.log")


def alertmanager(directory: Path, configuration: str) -> Server:
    """Return an Alertmanager without a cluster."""
    port = free_port()
    path = directory / "alertmanager.yml"
    path.write_text(configuration)
    arguments = [
        program("prometheus-alertmanager", "alertmanager"),
        f"--config.file={path}",
        f"--storage.path={directory / 'alertmanager-data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
        SNAPSHOTS,
    ]
    return Server("alertmanager", arguments, f"http://127.0.0.1:{port}", directory / "alertmanager.log")


def prometheus(directory: Path, configuration: str) -> Prometheus:
    """Return a Prometheus with an empty database, or what DATABASE names instead."""
    if os.environ.get("DATABASE") == "victoria-metrics":
        return _victoria_metrics(directory, configuration)
    port = free_port()
    path = directory / "prometheus.yml"
    path.write_text(configuration)
    arguments = [
        program("prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={directory / 'prometheus-data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.retention.time=1d",
    ]
    return Prometheus("prometheus", arguments, f"http://127.0.0.1:{port}", directory / "prometheus.log")


def _victoria_metrics(directory: Path, configuration: str) -> VictoriaMetrics:
    """Return a VictoriaMetrics with vmalert. Samples are visible and judged after a second, by default after 30."""
    ports, path, config = (free_port(), free_port()), directory / "prometheus.yml", yaml.safe_load(configuration)
    path.write_text(configuration)
    url, vmalert = (f"http://127.0.0.1:{port}" for port in ports)
    arguments = [
        program("victoria-metrics"),
        f"-promscrape.config={path}",
        "-promscrape.config.strictParse=false",
        f"-storageDataPath={directory / 'victoria-metrics-data'}",
        f"-httpListenAddr={url.removeprefix('http://')}",
        "-search.latencyOffset=1s",
    ]
    server = VictoriaMetrics("victoria-metrics", arguments, url, directory / "victoria-metrics.log", "/health")
    alertmanagers = config.get("alerting", {}).get("alertmanagers", [])
    targets = [to for one in alertmanagers for static in one["static_configs"] for to in static["targets"]]
    arguments = [
        program("vmalert"),
        *(f"-rule={rules}" for rules in config.get("rule_files", [])),
        *(f"-notifier.url=http://{to}" for to in targets or ["127.0.0.1:9"]),
        *(f"-{name}.url={url}" for name in ("datasource", "remoteWrite", "remoteRead")),
        f"-httpListenAddr={vmalert.removeprefix('http://')}",
        f"-evaluationInterval={config.get('global', {}).get('evaluation_interval', '1m')}",
        "-rule.evalDelay=1s",
        "-remoteWrite.flushInterval=1s",
    ]
    server.vmalert = Server("vmalert", arguments, vmalert, directory / "vmalert.log", "/health")
    return server
