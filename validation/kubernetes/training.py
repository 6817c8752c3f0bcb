"""The test job as a Job of two pods, made from examples/kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from testing.job.launch import TrainingJob
from validation.kubernetes.cluster import IMAGE_NAME, Cluster, Manifest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/kubernetes"
NAMESPACE = "training"
USER = 1000
"""Neither root nor the exporter's user."""


class PodsJob(TrainingJob):
    """Two pods with one rank each."""

    ranks = 2

    def __init__(self, cluster: Cluster, directory: Path, pattern: str, run: str) -> None:
        """Prepare the job. `pattern` is a folder of the examples; the pods share `directory`."""
        super().__init__(directory, run, Path())
        directory.chmod(0o777)
        self._cluster, self._shared, self._pattern = cluster, directory, pattern

    def start(self, **common: Any) -> None:
        """Create the Job, its ranks with this behavior from the first step on."""
        self._control.common = common
        self._control.write(from_step=0)
        self._cluster.apply(manifest(self._pattern, self.run, self._shared))

    @property
    def owner(self) -> str:
        """The owner of its run in Prometheus."""
        return f"{NAMESPACE}/{USER}" if self._pattern == "sidecar" else f"{USER}"

    def is_running(self) -> bool:
        """Return whether the Job exists and none of its pods has failed."""
        found = self._cluster.items("job", "-n", NAMESPACE)
        return any(one["metadata"]["name"] == self.run and not one["status"].get("failed") for one in found)

    def terminate(self) -> None:
        """Delete the Job and wait for its pods' end."""
        self._cluster.kubectl("-n", NAMESPACE, "delete", "job", self.run, "--cascade=foreground", "--timeout=120s")

    def last_output(self) -> str:
        """Return the end of the pods' output."""
        selector = f"--selector=job-name={self.run}"
        return self._cluster.kubectl("-n", NAMESPACE, "logs", selector, "--container=trainer", "--tail=15", "--prefix")


def manifest(pattern: str, name: str, shared: Path) -> Manifest:
    """Return the example's Job with our image and training, without fields that Kubernetes 1.20 or this node lacks."""
    documents = yaml.safe_load_all((EXAMPLES / pattern / "job.yaml").read_text())
    (job,) = (document for document in documents if document["kind"] == "Job")
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    del job["spec"]["completionMode"]
    pod = job["spec"]["template"]["spec"]
    del pod["subdomain"]
    (trainer,) = pod["containers"]
    _train(trainer, shared)
    # An ordinary container, because there are no native sidecars yet: the Job does not complete by itself.
    for sidecar in pod.pop("initContainers", []):
        del sidecar["restartPolicy"]
        sidecar["image"] = IMAGE_NAME
        pod["containers"].append(sidecar)
    # A volume for an interpreter below /root: the image's directory is closed to other users.
    pod["volumes"].append({"name": "root", "emptyDir": {}})
    trainer["volumeMounts"].append({"name": "root", "mountPath": "/root"})
    for number, path in enumerate(_folders(shared)):
        pod["volumes"].append({"name": f"folder-{number}", "hostPath": {"path": str(path)}})
        mount = {"name": f"folder-{number}", "mountPath": str(path), "readOnly": path != shared}
        trainer["volumeMounts"].append(mount)
    return dict(job)


def _folders(shared: Path) -> list[Path]:
    """Return this machine's folders that the job needs: interpreter, torch, checkout, and the shared one."""
    wanted = {ROOT, Path(sys.prefix), Path(sys.base_prefix), shared}
    return sorted(path for path in wanted if not any(path.is_relative_to(other) for other in wanted - {path}))


def _train(trainer: Manifest, shared: Path) -> None:
    """Run the test job in the container. There is no DNS: torchrun uses a file, and pods are named by address."""
    del trainer["resources"]
    trainer["image"], trainer["workingDir"] = IMAGE_NAME, str(ROOT)
    own = trainer.get("securityContext", {"allowPrivilegeEscalation": False})
    trainer["securityContext"] = {**own, "runAsUser": USER}
    meeting = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={shared / 'rendezvous'}"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meeting, "--local-addr=$(ADDRESS)"]
    trainer["command"] = [sys.executable, *torchrun, "-m", "testing.job", str(shared), "gloo"]
    for variable in trainer["env"]:
        if variable["name"] == "RANKSCOPE_RUN":
            variable["valueFrom"]["fieldRef"]["fieldPath"] = "metadata.labels['job-name']"
    trainer["env"] += [
        {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"},
        {"name": "HOME", "value": "/tmp"},
    ]
