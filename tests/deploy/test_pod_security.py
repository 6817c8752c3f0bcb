"""The pods of the chart and of the examples meet the Pod Security level that docs/install/kubernetes.md names."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.pod_security import (
    BASELINE,
    PRIVILEGED,
    RESTRICTED,
    Manifest,
    baseline,
    containers,
    level,
    restricted,
)
from tests.deploy.test_helm import only
from tests.deploy.test_kubernetes_examples import EXAMPLES, JOBS, PAGE, pods

GPUS_ONLY = "--set=hostPID=false,runDirectory.path="
# By the words that the page has in the first column of its table.
MODES = {
    "the chart's default": (),
    "`runDirectory.create=false`": ("--set=runDirectory.create=false",),
    "`runDirectory.tmpfs.enabled=true`": ("--set=runDirectory.tmpfs.enabled=true",),
    "`state.hostPath`": (f"{GPUS_ONLY},state.hostPath=/var/lib/rankscope",),
    "`podAttribution.enabled=true`": ("--set=podAttribution.enabled=true",),
    "`hostPID=false`": ("--set=hostPID=false",),
    "`hostNetwork=true`": (f"{GPUS_ONLY},hostNetwork=true",),
    "`hostPID=false,runDirectory.path=`": (GPUS_ONLY,),
}
COMPLIANT: Manifest = {
    "metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/one": "runtime/default"}},
    "spec": {
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "sysctls": [{"name": "net.ipv4.tcp_rmem", "value": "4096 87380 16777216"}],
        },
        "initContainers": [{"name": "first", "securityContext": {}}],
        "containers": [
            {
                "name": "one",
                "ports": [{"containerPort": 10417}],
                "livenessProbe": {"httpGet": {"path": "/-/healthy", "port": 10417}},
                "lifecycle": {"preStop": {"exec": {"command": ["sleep", "35"]}}},
                "securityContext": {},
            }
        ],
        "volumes": [{"name": "run", "emptyDir": {}}],
    },
}
for _container in (*COMPLIANT["spec"]["initContainers"], *COMPLIANT["spec"]["containers"]):
    _container["securityContext"] |= {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
# One change of the compliant pod for each rule of the standard: the place, the value, and the level that is left.
POD, CONTEXT = ("spec",), ("spec", "securityContext")
INIT, OWN = ("spec", "initContainers", 0, "securityContext"), ("spec", "containers", 0, "securityContext")
CONTAINER = OWN[:-1]
VIOLATIONS: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "host network": ((*POD, "hostNetwork"), True, PRIVILEGED),
    "host processes": ((*POD, "hostPID"), True, PRIVILEGED),
    "host IPC": ((*POD, "hostIPC"), True, PRIVILEGED),
    "host path": ((*POD, "volumes"), [{"name": "run", "hostPath": {"path": "/run"}}], PRIVILEGED),
    "host port": ((*CONTAINER, "ports"), [{"containerPort": 1, "hostPort": 1}], PRIVILEGED),
    "host of a probe": ((*CONTAINER, "livenessProbe"), {"tcpSocket": {"port": 1, "host": "10.0.0.1"}}, PRIVILEGED),
    "host of a hook": ((*CONTAINER, "lifecycle"), {"preStop": {"httpGet": {"host": "a", "port": 1}}}, PRIVILEGED),
    "Windows host process": ((*CONTEXT, "windowsOptions"), {"hostProcess": True}, PRIVILEGED),
    "privileged init container": ((*INIT, "privileged"), True, PRIVILEGED),
    "privileged container": ((*OWN, "privileged"), True, PRIVILEGED),
    "capability": ((*OWN, "capabilities"), {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, PRIVILEGED),
    "AppArmor": ((*OWN, "appArmorProfile"), {"type": "Unconfined"}, PRIVILEGED),
    "AppArmor of the pod": ((*CONTEXT, "appArmorProfile"), {"type": "Unconfined"}, PRIVILEGED),
    "AppArmor by annotation": (
        ("metadata", "annotations"),
        {"container.apparmor.security.beta.kubernetes.io/one": "unconfined"},
        PRIVILEGED,
    ),
    "SELinux type": ((*OWN, "seLinuxOptions"), {"type": "spc_t"}, PRIVILEGED),
    "SELinux user": ((*CONTEXT, "seLinuxOptions"), {"user": "system_u"}, PRIVILEGED),
    "proc mount": ((*OWN, "procMount"), "Unmasked", PRIVILEGED),
    "seccomp": ((*OWN, "seccompProfile"), {"type": "Unconfined"}, PRIVILEGED),
    "sysctl": ((*CONTEXT, "sysctls"), [{"name": "kernel.msgmax", "value": "1"}], PRIVILEGED),
    "volume type": ((*POD, "volumes"), [{"name": "share", "nfs": {"server": "a", "path": "/"}}], BASELINE),
    "privilege escalation": ((*OWN, "allowPrivilegeEscalation"), True, BASELINE),
    "may be root": ((*CONTEXT, "runAsNonRoot"), None, BASELINE),
    "init container may be root": ((*INIT, "runAsNonRoot"), False, BASELINE),
    "root": ((*OWN, "runAsUser"), 0, BASELINE),
    "root of the pod": ((*CONTEXT, "runAsUser"), 0, BASELINE),
    "no seccomp": ((*CONTEXT, "seccompProfile"), {}, BASELINE),
    "capabilities that are kept": ((*INIT, "capabilities"), {"drop": ["KILL"]}, BASELINE),
    "capability of baseline": ((*OWN, "capabilities"), {"drop": ["ALL"], "add": ["CHOWN"]}, BASELINE),
}


def test_a_compliant_pod_is_restricted() -> None:
    assert list(restricted(COMPLIANT)) == []


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_of_the_standard_is_found(name: str) -> None:
    (*place, last), value, left = VIOLATIONS[name]
    pod = copy.deepcopy(COMPLIANT)
    found: Any = pod
    for key in place:
        found = found[key]
    found[last] = value
    assert level(pod) == left
    assert len({*baseline(pod), *restricted(pod)}) >= 1


def documented() -> dict[str, str]:
    """Return the levels in the page's table by the first column."""
    rows = re.findall(r"^\| (.+?) \| `(privileged|baseline|restricted)` \|", PAGE, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def test_the_page_names_the_level_of_each_mode() -> None:
    assert documented().keys() == MODES.keys() | {"`examples/kubernetes/node`", "`examples/kubernetes/sidecar`"}


@pytest.mark.parametrize("mode", MODES)
def test_the_daemonset_has_the_documented_level(mode: str) -> None:
    assert level(only("DaemonSet", *MODES[mode])["spec"]["template"]) == documented()[mode]


@pytest.mark.parametrize("mode", MODES)
def test_every_container_of_the_chart_has_only_what_it_needs(mode: str) -> None:
    template = only("DaemonSet", *MODES[mode])["spec"]["template"]
    assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(template):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context.get("privileged", False) == ("tmpfs" in mode and container["name"] == "run-directory")
        if not context.get("privileged"):
            added = ["CHOWN", "DAC_OVERRIDE", "FOWNER"] if container["name"] == "state-directory" else None
            assert (context["capabilities"]["drop"], context["capabilities"].get("add")) == (["ALL"], added)
            assert not context["allowPrivilegeEscalation"]


@pytest.mark.parametrize("mode", MODES)
def test_only_init_containers_and_pod_attribution_use_uid_0(mode: str) -> None:
    template = only("DaemonSet", *MODES[mode])["spec"]["template"]
    roots = {one["name"] for one in containers(template) if one["securityContext"]["runAsUser"] == 0}
    attribution = {"exporter"} if "podAttribution" in mode else set()
    assert roots - {"run-directory", "state-directory"} == attribution
    if "runDirectory.create=false" in mode:
        assert roots == set()


@pytest.mark.parametrize("path", JOBS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_training_pod_has_the_documented_level(path: Path) -> None:
    assert {level(pod) for pod in pods(path)} == {documented()[f"`examples/kubernetes/{path.parent.name}`"]}


def test_the_kustomize_base_needs_what_the_chart_needs() -> None:
    base = yaml.safe_load_all((EXAMPLES.parents[1] / "deploy/kustomize/rankscope.yaml").read_text())
    (daemonset,) = (one for one in base if one["kind"] == "DaemonSet")
    assert level(daemonset["spec"]["template"]) == documented()["the chart's default"]
    assert RESTRICTED in documented().values()
