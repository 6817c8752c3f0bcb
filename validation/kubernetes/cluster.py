"""The cluster that cluster.sh starts, and its clients."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from deploy.helm.generate import program

SCRIPT = Path(__file__).with_name("cluster.sh")
NODE = "gpu-node-1"
IMAGE = "rankscope-exporter:checkout"
IMAGE_NAME = f"docker.io/library/{IMAGE}"

Manifest = dict[str, Any]


class Process(NamedTuple):
    """Privileges of a container's first process, from the kernel."""

    uid: int
    capabilities: int
    """Effective capabilities as bits."""
    seccomp: int
    """2 is a filter."""


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.programs = directory / "root/usr/bin"
        self.kubeconfig = directory / "kubeconfig"
        self._environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(directory / "cache")}

    def kubectl(self, *arguments: str) -> str:
        """Return the output of kubectl. Raises RuntimeError."""
        return self._run("kubectl", arguments)

    def helm(self, *arguments: str) -> str:
        """Return the output of helm. Raises RuntimeError."""
        return self._run("helm", arguments)

    def apply(self, *documents: Manifest) -> None:
        """Create or change objects. Raises RuntimeError."""
        self._run("kubectl", ("apply", "--validate=false", "-f", "-"), yaml.safe_dump_all(documents))

    def items(self, kind: str, *arguments: str) -> list[Manifest]:
        found: list[Manifest] = json.loads(self.kubectl("get", kind, "-o", "json", *arguments))["items"]
        return found

    def discovery(self) -> Manifest:
        """Return `kubernetes_sd_configs` of a user who may read everything."""
        configuration = yaml.safe_load(self.kubeconfig.read_text())
        (cluster,), (user,) = configuration["clusters"], configuration["users"]
        files = {"ca_file": cluster["cluster"]["certificate-authority"]}
        files |= {"cert_file": user["user"]["client-certificate"], "key_file": user["user"]["client-key"]}
        found = {"role": "pod", "api_server": cluster["cluster"]["server"], "tls_config": files}
        return {"kubernetes_sd_configs": [found]}

    def process(self, pod: Manifest, container: str) -> Process:
        """Return the first process of a pod's container."""
        (status,) = (one for one in pod["status"]["containerStatuses"] if one["name"] == container)
        identifier = status["containerID"].rpartition("/")[2]
        pids = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cgroup") if identifier in _text(path)]
        fields = dict(line.split(":\t", 1) for line in _text(Path(f"/proc/{min(pids)}/status")).splitlines())
        return Process(int(fields["Uid"].split()[1]), int(fields["CapEff"], 16), int(fields["Seccomp"]))

    def _run(self, name: str, arguments: tuple[str, ...], text: str | None = None) -> str:
        done = subprocess.run(
            [program(name), *arguments], env=self._environment, input=text, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""


@contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    """Build missing programs, and run an empty cluster with this checkout's image."""
    for command in (["build", directory], ["image", directory, IMAGE], ["up", directory]):
        subprocess.run([SCRIPT, *map(str, command)], check=True)
    try:
        yield Cluster(directory)
    finally:
        subprocess.run([SCRIPT, "down", str(directory)], check=True)
