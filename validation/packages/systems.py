"""Debian and Ubuntu systems in containers of systemd-nspawn: bootstrapped once, and booted without leaving a trace."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.report import ROOT, Check
from testing.waiting import eventually

BASES = ROOT / "build/systems"
UBUNTU = "http://archive.ubuntu.com/ubuntu"
HOSTS = "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 node\n"
"""/etc/hosts from Debian's installer, for a host with the name `node`."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/root",
}


@dataclass(frozen=True)
class System:
    name: str
    suite: str
    python: str
    """The Python version of the package's commands on this system."""
    packages: str
    """The packages in addition to a minimal system."""
    ubuntu: bool = False

    @property
    def base(self) -> Path:
        """The directory of the installed system, which is never written to."""
        return BASES / self.suite


DEBIAN_12 = System(
    "Debian 12",
    "bookworm",
    "3.11",
    "systemd-sysv dbus iproute2 procps curl openssl openssh-server python3 python3-apt python3-venv man-db",
)
DEBIAN_13 = System("Debian 13", "trixie", "3.13", "python3 ubuntu-archive-keyring")
OTHERS = (
    DEBIAN_13,
    System("Ubuntu 22.04", "jammy", "3.11", "python3 python3.11", ubuntu=True),
    System("Ubuntu 24.04", "noble", "3.12", "python3", ubuntu=True),
    System("Ubuntu 26.04", "resolute", "3.14", "python3", ubuntu=True),
)


def bootstrap(system: System) -> None:
    """Install the system's base if it is missing. Debian 12 has Debian 13's key, which has Ubuntu's key."""
    if system.base.exists():
        return
    unfinished = system.base.with_suffix(".unfinished")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--variant=minbase", system.suite, str(unfinished)]
    if system.ubuntu:
        bootstrap(DEBIAN_13)
        keyring = DEBIAN_13.base / "usr/share/keyrings/ubuntu-archive-keyring.gpg"
        command[1:1] = [f"--keyring={keyring}", "--components=main,universe"]
        command += [UBUNTU, "/usr/share/debootstrap/scripts/gutsy"]  # Debian 12's debootstrap does not know them all
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if system.ubuntu:
        updates = unfinished / "etc/apt/sources.list.d/updates.list"
        updates.write_text(f"deb {UBUNTU} {system.suite}-updates main universe\n")
    install = f"apt-get update -qq; apt-get install -qq --no-install-recommends {system.packages}"
    inside = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={unfinished}", "--pipe"]
    subprocess.run([*inside, "sh", "-ec", install], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    (unfinished / "etc/hosts").write_text(HOSTS)
    (unfinished / "etc/hostname").write_text("node\n")
    unfinished.rename(system.base)


def container(system: System, *options: str, read_only: Sequence[Path] = ()) -> list[str]:
    """Return the command of a container whose changes are kept in memory and discarded."""
    binds = [f"--bind-ro={path}" for path in read_only]
    command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={system.base}"]
    return [*command, "--volatile=overlay", *binds, *options]


def run_in(system: System, script: str, read_only: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    """Run a script in the system, without booting it and without a network."""
    command = container(system, "--private-network", "--pipe", "sh", "-euc", script, read_only=read_only)
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


class BootedSystem:
    """A booted system with its own address, which this machine can reach."""

    NAME = "rankscope"
    HOST_ADDRESS = "10.104.17.1"
    ADDRESS = "10.104.17.2"

    def __init__(self, system: System, read_only: Sequence[Path], log: Path) -> None:
        self._command = container(
            system, "--boot", f"--machine={self.NAME}", "--network-veth", "--console=pipe", read_only=read_only
        )
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def __enter__(self) -> BootedSystem:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            eventually(self._find_leader, pause=0.1)
            eventually(lambda: self.run("systemctl is-system-running").stdout.strip() == "running", pause=0.5)
            self._connect()
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self.run("systemctl poweroff")
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _find_leader(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        started = [child for child in children if Path(f"/proc/{child}/comm").read_text().strip() == "systemd"]
        self._leader = int(started[0]) if started else 0
        return bool(self._leader)

    def _connect(self) -> None:
        interface = f"ve-{self.NAME}"
        subprocess.run(["ip", "address", "add", f"{self.HOST_ADDRESS}/30", "dev", interface], check=True)
        subprocess.run(["ip", "link", "set", interface, "up"], check=True)
        self.do(f"ip address add {self.ADDRESS}/30 dev host0; ip link set host0 up")

    def command(self, script: str, user: str = "root") -> list[str]:
        """Return a command of this machine that runs a script in the container."""
        variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        enter = ["nsenter", f"--target={self._leader}", "--all", "env", "--ignore-environment", *variables]
        as_user = [] if user == "root" else ["runuser", "--user", user, "--"]
        return [*enter, *as_user, "bash", "-euo", "pipefail", "-c", script]

    def run(self, script: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        """Run a script in the system, and return its outputs and status."""
        command = self.command(script, user)
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    def do(self, script: str, user: str = "root") -> str:
        """Run a script in the system, and return its output. Raises CalledProcessError if it fails."""
        done = self.run(script, user)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, script, done.stdout, done.stderr)
        return done.stdout

    def start(self, script: str, user: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(f"exec &> /dev/null; {script}", user), stdin=subprocess.DEVNULL)


SERVE = """
apt-get install --quiet --yes --no-install-recommends {deb} > /tmp/output 2>&1
rankscope-exporter --simulate=2 --web.listen-address=127.0.0.1:10417 2>> /tmp/output & exporter=$!
python3 - >> /tmp/output <<END
import time, urllib.request
for _ in range(100):
    try:
        print(urllib.request.urlopen("http://127.0.0.1:10417/metrics").read().decode())
        break
    except OSError:
        time.sleep(0.2)
END
grep --quiet '^rankscope_gpu_up.gpu="1".* 1.0$' /tmp/output
rankscope top --once >> /tmp/output
kill $exporter
rankscope-exporter --version
"""


def check(deb: Path) -> list[Check]:
    """Install the package in each of the other systems, without a network, and scrape the exporter."""
    checks = []
    for system in OTHERS:
        bootstrap(system)
        done = run_in(system, f"trap 'cat /tmp/output >&2' EXIT; {SERVE.format(deb=deb)}", [deb.parent])
        holds = done.returncode == 0 and f"(Python {system.python}." in done.stdout
        found = done.stdout.strip() if holds else done.stderr.strip()[-300:]
        checks.append(Check(f"{system.name} installs it, serves and runs rankscope top", holds, found))
    return checks
