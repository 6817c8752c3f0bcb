"""The training jobs in examples/kubernetes: Kubernetes accepts their pods, and the exporter sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rankscope.record.writer import SYSTEM_RUN_DIR
from rankscope_exporter import registry
from rankscope_exporter.config import DEFAULT_PORT, parse

EXAMPLES = Path(__file__).parents[2] / "examples/kubernetes"
JOBS = sorted(EXAMPLES.glob("*/*.yaml"))
PAGE = (EXAMPLES.parents[1] / "docs/install/kubernetes.md").read_text()
# The label with which a job's controller names the job.
RUN_LABELS = {
    "job": "batch.kubernetes.io/job-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
}
KUBERNETES = ["1.29", "1.37"]  # the first with native sidecars, and the newest
SCRAPE_INTERVAL = 15  # seconds, of the chart by default

Manifest = dict[str, Any]


def templates(value: Any) -> Iterator[Manifest]:
    """Yield the pod templates in a document."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


def pods(path: Path) -> list[Manifest]:
    found = [pod for one in yaml.safe_load_all(path.read_text()) for pod in templates(one)]
    assert found
    return found


def environment(container: Manifest) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def test_there_is_a_pair_for_each_kind_of_job_and_the_page_names_it() -> None:
    assert {path.relative_to(EXAMPLES).as_posix() for path in JOBS} == {
        f"{pattern}/{kind}.yaml" for pattern in ("node", "sidecar") for kind in RUN_LABELS
    }
    assert set(re.findall(r"examples/kubernetes/(\S+\.yaml)", PAGE)) >= {
        *(path.relative_to(EXAMPLES).as_posix() for path in JOBS),
        "inject.yaml",
    }


@pytest.mark.parametrize("path", [*JOBS, EXAMPLES / "inject.yaml"], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_kubernetes_knows_every_field_of_its_own_kinds(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["apiVersion"] in ("v1", "batch/v1", "admissionregistration.k8s.io/v1"):
            kubernetes_validate.validate(document, KUBERNETES[-1], strict=True)
    for template in templates(list(yaml.safe_load_all(path.read_text()))):
        pod = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": "train", **template["metadata"]}}
        for version in KUBERNETES:
            kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("path", JOBS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_rank_is_named_by_its_job_and_knows_its_node_and_pod(path: Path) -> None:
    for pod in pods(path):
        (container,) = pod["spec"]["containers"]
        variables = environment(container)
        assert variables["RANKSCOPE"] == "1"
        assert variables["RANKSCOPE_RUN"]["fieldRef"] == {"fieldPath": f"metadata.labels['{RUN_LABELS[path.stem]}']"}
        assert variables["RANKSCOPE_NODE"]["fieldRef"] == {"fieldPath": "spec.nodeName"}
        names = list(variables)
        # Kubernetes expands $(NAME) only if the variable is defined before.
        for used in re.findall(r"\$\((\w+)\)", variables["RANKSCOPE_LABELS"]):
            assert names.index(used) < names.index("RANKSCOPE_LABELS")


@pytest.mark.parametrize("path", [path for path in JOBS if path.parent.name == "node"], ids=lambda path: path.name)
def test_on_the_node_records_go_to_the_run_directory(path: Path) -> None:
    for pod in pods(path):
        assert pod["metadata"]["labels"] == {"rankscope": "node"}
        assert "initContainers" not in pod["spec"]
        (volume,), (container,) = pod["spec"]["volumes"], pod["spec"]["containers"]
        assert volume["hostPath"] == {"path": str(SYSTEM_RUN_DIR), "type": "DirectoryOrCreate"}
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": str(SYSTEM_RUN_DIR)}]


@pytest.mark.parametrize("path", [path for path in JOBS if path.parent.name == "sidecar"], ids=lambda path: path.name)
def test_a_sidecar_reads_the_trainers_records_and_has_no_other_permission(path: Path) -> None:
    for pod in pods(path):
        assert pod["metadata"]["labels"] == {"rankscope": "sidecar"}  # as the chart's PodMonitor selects
        (sidecar,), (trainer,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
        run_dir = Path(environment(trainer)["RANKSCOPE_RUN_DIR"])
        assert parse(registry.HELP, sidecar["args"], {}).run_dirs == (run_dir,)
        for container in (sidecar, trainer):
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            # The mount is writable for all; the directory below it belongs to the trainer.
            assert mounts[str(run_dir.parent)]["name"] == "rankscope"
        assert sidecar["restartPolicy"] == "Always"
        (_, seconds) = sidecar["lifecycle"]["preStop"]["exec"]["command"]
        assert 2 * SCRAPE_INTERVAL < int(seconds) < pod["spec"]["terminationGracePeriodSeconds"] - 10
        assert sidecar["ports"] == [{"name": "rankscope", "containerPort": DEFAULT_PORT}]
        assert sidecar["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPath" in volume for volume in pod["spec"]["volumes"])
