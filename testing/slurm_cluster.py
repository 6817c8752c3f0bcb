"""A Slurm cluster of one node with four fake GPUs: slurmctld, slurmd and munged of this machine, run by root.

Everything is in one directory, ports are free ones, and all daemons run in the foreground and are stopped by their
pids. With `root`, the programs are those that unpack_slurm.sh put there, so that several versions run on one machine.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from testing.servers import free_port

GPUS, CPUS = 4, 8
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "squeue", "scontrol", "sinfo")
DIRECTORIES = ("usr/sbin", "usr/bin")
LIBRARIES = "usr/lib/x86_64-linux-gnu"
STARTS_WITHIN, STOPS_WITHIN = 30.0, 20.0  # seconds
NULL = os.makedev(1, 3)

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
ReturnToService=2
PrologFlags=Alloc
{more}
"""


class SlurmError(RuntimeError):
    """The cluster failed. The text has the end of a log."""


def is_installed(root: Path | None = None) -> bool:
    """Return whether Slurm is installed and this process is root."""
    return os.geteuid() == 0 and all(_found(name, root) for name in ("munged", "slurmctld", "slurmd"))


class SlurmCluster:
    """A cluster that runs until its block ends."""

    def __init__(self, directory: Path, root: Path | None = None, **settings: object) -> None:
        """Prepare the cluster. `settings` are more lines of slurm.conf."""
        self.directory, self._root = directory, root.resolve() if root else None
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._programs = {name: self._program(name) for name in PROGRAMS}
        self._configure(settings)

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def version(self) -> str:
        return self.run("sinfo", "--version").split()[-1]

    def environment(self) -> Mapping[str, str]:
        """Return the environment of Slurm's commands for this cluster."""
        path = os.environ["PATH"] if self._root is None else f"{self._root}/usr/bin:{os.environ['PATH']}"
        return {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf"), "PATH": path}

    def run(self, program: str, *arguments: object, uid: int = 0) -> str:
        """Return the output of a Slurm command. Raises SlurmError."""
        drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        command = [*drop, self._programs[program], *map(str, arguments)]
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SlurmError(f"{program}: {done.stderr}")
        return done.stdout

    def submit(self, script: Path, *options: object, uid: int = 0) -> str:
        """Queue a batch script. Return the job's number."""
        return self.run("sbatch", "--parsable", *options, script, uid=uid).strip()

    def show(self, job: str) -> Mapping[str, str]:
        """Return the controller's fields of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "--oneliner", "--details", "show", "job", job)))

    def wait_for(self, job: str, *states: str, within: float = 60.0) -> Mapping[str, str]:
        """Return the controller's fields of a job once it is in one of these states. Raises SlurmError."""
        deadline = time.monotonic() + within
        while (shown := self.show(job))["JobState"] not in states:
            if time.monotonic() > deadline:
                raise SlurmError(f"job {job} is {shown['JobState']}, not {' or '.join(states)}\n{self._log('slurmd')}")
            time.sleep(0.2)
        return shown

    def _program(self, name: str) -> str:
        found = _found(name, self._root)
        if found is None:
            raise SlurmError(f"{name} is not installed")
        return str(found)

    def _configure(self, settings: Mapping[str, object]) -> None:
        directory = self.directory
        for name in ("state", "spool", "gpus", "munge"):
            (directory / name).mkdir(parents=True)
        directory.chmod(0o755)
        (directory / "munge").chmod(0o711)
        for gpu in range(GPUS):  # Slurm needs a device file but does not use it
            os.mknod(directory / "gpus" / f"nvidia{gpu}", 0o666 | stat.S_IFCHR, NULL)
        key = directory / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        lines = [f"{name}={value}" for name, value in settings.items()]
        if self._root:
            lines.append(f"PluginDir={self._root}/{LIBRARIES}/slurm-wlm")
            (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        text = CONFIGURATION.format(
            host=host,
            directory=directory,
            controller=free_port(),
            node=free_port(),
            tracking="cgroup" if self._root else "linuxproc",
            cpus=CPUS,
            gpus=GPUS,
            more="\n".join(lines),
        )
        (directory / "slurm.conf").write_text(text)
        (directory / "gres.conf").write_text(f"NodeName={host} Name=gpu File={directory}/gpus/nvidia[0-{GPUS - 1}]\n")

    def _start(self) -> None:
        munge = self.directory / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._daemon("munged", "--foreground", "--force", *(f"--{name}={munge / file}" for name, file in files.items()))
        self._wait_until(lambda: (munge / "socket").exists(), "munged")
        configuration = self.directory / "slurm.conf"
        self._daemon("slurmctld", "-D", "-f", configuration)
        stepd = ["-d", self._programs["slurmstepd"]] if self._root else []
        self._daemon("slurmd", "-D", "-f", configuration, *stepd)
        self._wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"), "slurmctld")

    def _daemon(self, name: str, *arguments: object) -> None:
        command = [self._programs[name], *map(str, arguments)]
        with (self.directory / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=self.environment(), cwd=self.directory)
            )

    def _wait_until(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._holds(condition):
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                raise SlurmError(f"{name} is not ready\n{self._log('slurmctld')}\n{self._log('slurmd')}")
            time.sleep(0.2)

    def _holds(self, condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except SlurmError:
            return False

    def _log(self, name: str) -> str:
        path = self.directory / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

    def _stop(self) -> None:
        while self._daemons:
            daemon = self._daemons.pop()
            daemon.terminate()
            try:
                daemon.wait(STOPS_WITHIN)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _found(name: str, root: Path | None) -> Path | None:
    if root is None:
        path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        return Path(path) if path else None
    candidates = (root / folder / f"{name}{end}" for folder in DIRECTORIES for end in ("-wlm", ""))
    return next((path for path in candidates if path.is_file()), None)


def lines(*parts: Sequence[str] | str) -> str:
    """Return a batch script."""
    return "\n".join(["#!/bin/sh", *(part if isinstance(part, str) else " ".join(part) for part in parts), ""])
