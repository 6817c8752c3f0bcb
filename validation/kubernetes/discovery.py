"""The pods' ports as targets in a file, for Debian's Prometheus, which is built without Kubernetes discovery."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from validation.kubernetes.cluster import Cluster, Manifest

EVERY = 3.0  # seconds
NO_WORD = re.compile(r"\W")
META = "__meta_kubernetes_"


class Discovery:
    """A file of targets with the labels of `role: pod`, updated until its block ends."""

    def __init__(self, cluster: Cluster, file: Path) -> None:
        self._cluster, self._file = cluster, file
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self.configuration = {"file_sd_configs": [{"files": [str(file)]}]}

    def __enter__(self) -> Discovery:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(EVERY):
            self._write()

    def _write(self) -> None:
        groups = [group for pod in self._cluster.items("pod", "-A") for group in targets(pod)]
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(groups))
        draft.rename(self._file)


def targets(pod: Manifest) -> Iterator[Manifest]:
    """Yield a target group for each port of the pod's containers."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
    if not status.get("podIP"):
        return
    labels = {f"{META}pod_label_{NO_WORD.sub('_', key)}": value for key, value in metadata.get("labels", {}).items()}
    labels |= {
        f"{META}namespace": metadata["namespace"],
        f"{META}pod_name": metadata["name"],
        f"{META}pod_node_name": spec["nodeName"],
        f"{META}pod_phase": status["phase"],
    }
    for container in spec["containers"]:
        for port in container.get("ports", ()):
            names = {"container_name": container["name"], "container_port_name": port.get("name", "")}
            own = {f"{META}pod_{name}": value for name, value in names.items()}
            yield {"targets": [f"{status['podIP']}:{port['containerPort']}"], "labels": labels | own}
