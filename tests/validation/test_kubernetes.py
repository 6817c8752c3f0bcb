"""The manifests and configurations of `make kubernetes`. The cluster itself needs root and minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from testing.exporter_process import eventually, metrics, status
from testing.pod_monitor import scrape_config
from validation.kubernetes import lies
from validation.kubernetes.discovery import targets
from validation.kubernetes.training import manifest

PATTERNS = ("node", "sidecar")
SHARED = Path("/shared/job")


def pod(pattern: str, **status: Any) -> dict[str, Any]:
    template = manifest(pattern, "train", SHARED)["spec"]["template"]
    metadata = {**template["metadata"], "name": "train-x7k2p", "namespace": "training"}
    spec = {**template["spec"], "nodeName": "gpu-node-1"}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running", "podIP": "10.0.0.7", **status}}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_job_of_the_example_is_valid(pattern: str) -> None:
    job = manifest(pattern, "train", SHARED)
    kubernetes_validate.validate(job, "1.25", strict=True)
    (trainer, *others) = job["spec"]["template"]["spec"]["containers"]
    assert len(others) == (pattern == "sidecar")
    writable = {mount["mountPath"] for mount in trainer["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/run/rankscope", "/root", str(SHARED)}
    paths = [mount["mountPath"] for mount in trainer["volumeMounts"]]
    assert len(paths) == len(set(paths))


def test_a_port_is_a_target_with_its_pod_s_labels() -> None:
    (group,) = targets(pod("sidecar"))
    assert group["targets"] == ["10.0.0.7:10417"]
    found = {name.removeprefix("__meta_kubernetes_"): value for name, value in group["labels"].items()}
    assert found == {
        "namespace": "training",
        "pod_name": "train-x7k2p",
        "pod_node_name": "gpu-node-1",
        "pod_phase": "Running",
        "pod_label_rankscope": "sidecar",
        "pod_container_name": "rankscope",
        "pod_container_port_name": "rankscope",
    }


def test_a_lying_pod_is_a_target_like_a_sidecar_and_shows_a_finding_of_another_user_s_run(free_port: int) -> None:
    page = lies.lies("train", "1000")
    liar = lies.liar(lies.UNLISTED, page)
    kubernetes_validate.validate(liar, "1.25", strict=True)
    (group,) = targets({**liar, "spec": {**liar["spec"], "nodeName": "a"}, "status": pod("sidecar")["status"]})
    assert group["labels"]["__meta_kubernetes_pod_label_rankscope"] == "sidecar"
    assert group["labels"]["__meta_kubernetes_pod_container_port_name"] == "rankscope"
    (container,) = liar["spec"]["containers"]
    command = [sys.executable, *container["command"][1:-1], container["command"][-1].replace("10417", str(free_port))]
    with subprocess.Popen(command, env={one["name"]: one["value"] for one in container["env"]}, stderr=-3) as server:
        try:
            eventually(lambda: status(f"http://127.0.0.1:{free_port}/metrics") == 200)
            assert {*page.splitlines()} == {*metrics(f"http://127.0.0.1:{free_port}")}
        finally:
            server.kill()
    assert 'rankscope_finding_ratio{run="train",owner="1000",kind="hang"' in page


def test_a_pod_without_a_port_or_an_address_is_no_target() -> None:
    assert list(targets(pod("node"))) == []
    assert list(targets(pod("sidecar", podIP=""))) == []


def test_selectors_are_escaped_and_named_like_prometheus_labels() -> None:
    monitor = {
        "metadata": {"name": "rankscope", "namespace": "rankscope"},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": "a.b"}},
            "podMetricsEndpoints": [
                {
                    "honorLabels": False,
                    "port": "rankscope",
                    "interval": "5s",
                    "scrapeTimeout": "4s",
                    "relabelings": [{"sourceLabels": ["a"], "targetLabel": "b"}],
                }
            ],
        },
    }
    relabel = scrape_config(monitor, {})["relabel_configs"]
    assert relabel[0]["source_labels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_name"]
    assert re.fullmatch(relabel[0]["regex"], "a.b")
    assert not re.fullmatch(relabel[0]["regex"], "axb")
    assert relabel[-1] == {"source_labels": ["a"], "target_label": "b"}
