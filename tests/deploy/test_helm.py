"""The Helm chart, rendered by helm: validity, permissions, and the generated files in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deploy.helm import generate
from deploy.helm.generate import CHART, program, render
from testing import servers
from testing.exporter_process import exporter as running_exporter
from testing.pod_monitor import scrape_config
from testing.stack import wait_for

from rankscope import __version__
from rankscope_exporter import registry
from rankscope_exporter.config import DEFAULT_PORT, Config, parse

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "helm"
IMAGE = "--set=image.repository=registry.example.com/rankscope-exporter"
GOLDEN = HERE / "everything.golden.yaml"
VALUES = {
    "default": (),
    "everything": (f"--values={HERE / 'everything.yaml'}",),
    "monitoring": ("--set=podMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true",),
    "attribution": ("--set=podAttribution.enabled=true,state.hostPath=/var/lib/rankscope",),
    "tmpfs": ("--set=runDirectory.tmpfs.enabled=true",),
    "passwords": ("--set=webConfig.secretName=web",),
    "closed": ("--set=networkPolicy.enabled=false,nodeSelector=null,tolerations=null,resources=null",),
}
KUBERNETES = ("1.25", "1.30", "1.37")
OPERATOR_API = "monitoring.coreos.com/v1"

Manifest = dict[str, Any]


def objects(*arguments: str) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(render(IMAGE, *arguments)) if one]


def only(kind: str, *arguments: str) -> Manifest:
    (found,) = (one for one in objects(*arguments) if one["kind"] == kind)
    return found


def pod(*arguments: str) -> Manifest:
    spec: Manifest = only("DaemonSet", *arguments)["spec"]["template"]["spec"]
    return spec


def exporter(*arguments: str) -> Manifest:
    (container,) = pod(*arguments)["containers"]
    return dict(container)


def settings(*arguments: str) -> Config:
    """Return the exporter's configuration from its flags. An unknown flag ends the test."""
    return parse(registry.HELP, exporter(*arguments)["args"], {})


LINK = "found symbolic link in path"  # helm's message about the rules, which are links to deploy/prometheus


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_helm_lint_reports_nothing(values: tuple[str, ...]) -> None:
    command = [program("helm"), "lint", "--strict", "--quiet", str(CHART), IMAGE, *values]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    assert (done.returncode, [line for line in lines if LINK not in line]) == (0, [])


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_knows_every_field(values: tuple[str, ...]) -> None:
    for one in objects(*values):
        if one["apiVersion"] != OPERATOR_API:
            for version in KUBERNETES:
                kubernetes_validate.validate(one, version, strict=True)


def test_the_chart_with_all_values_changed_is_rendered_as_before() -> None:
    text = render(f"--values={HERE / 'everything.yaml'}")
    if os.environ.get("RANKSCOPE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "if intended, write it with RANKSCOPE_GOLDEN=1; review the difference"


def test_kustomize_builds_the_chart_with_default_values() -> None:
    for path, text in generate.generated().items():
        assert path.read_text() == text, "run `make generate`"
    built = subprocess.run(
        [program("kubectl"), "kustomize", str(generate.OUTPUT.parent)], capture_output=True, text=True, check=True
    )
    kinds = {one["kind"] for one in yaml.safe_load_all(built.stdout)}
    assert kinds == {"DaemonSet", "NetworkPolicy", "ServiceAccount"}


def test_the_chart_has_the_packages_version_and_every_value_a_schema() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}


# Permissions.


def test_the_exporter_is_unprivileged_and_can_write_only_its_state() -> None:
    context = exporter()["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (65534, 65534, True)
    assert_has_no_privilege(context)
    assert pod()["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert not pod()["automountServiceAccountToken"]
    writable = {mount["name"] for mount in exporter()["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"state"}


def assert_has_no_privilege(context: Manifest) -> None:
    assert context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "privileged" not in context


def test_it_is_uid_0_without_a_capability_only_to_ask_the_kubelet() -> None:
    attribution = VALUES["attribution"]
    context = exporter(*attribution)["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (0, False)
    assert_has_no_privilege(context)
    assert settings(*attribution).kubelet_socket == Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    assert settings().kubelet_socket is None
    assert "chown -R 0:0 " in pod(*attribution)["initContainers"][1]["command"][-1]


def test_only_the_mount_of_a_tmpfs_is_privileged() -> None:
    (init,) = pod()["initContainers"]
    assert init["securityContext"]["runAsUser"] == 0
    assert_has_no_privilege(init["securityContext"])
    (init,) = pod(*VALUES["tmpfs"])["initContainers"]
    assert init["securityContext"]["privileged"]
    assert_has_no_privilege(exporter(*VALUES["tmpfs"])["securityContext"])


def test_with_passwords_the_probes_need_no_password() -> None:
    container = exporter(*VALUES["passwords"])
    for probe in (container["livenessProbe"], container["readinessProbe"]):
        assert probe["tcpSocket"] == {"port": "rankscope"}
    assert settings(*VALUES["passwords"]).web_config_file == Path("/etc/rankscope/web.yml")


def test_flags_and_port_are_those_of_the_exporter() -> None:
    assert settings("--set=scrapeInterval=5s").reference_interval == 10.0
    assert settings().reference_interval == 30.0
    (port,) = exporter()["ports"]
    assert port["containerPort"] == DEFAULT_PORT
    assert settings(*VALUES["everything"]).dcgm


# The run directory, with the init container's own command.


def init_command(directory: Path, *arguments: str) -> list[str]:
    command = pod(*arguments)["initContainers"][0]["command"]
    return [part.replace("/run/rankscope", str(directory)) for part in command]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the kubelet creates the directory as root")
@pytest.mark.parametrize(("before", "after"), [(0o755, 0o1777), (0o3770, 0o3770), (0o700, 0o700)])
def test_only_a_directory_that_the_kubelet_created_is_opened_for_all(tmp_path: Path, before: int, after: int) -> None:
    tmp_path.chmod(before)
    subprocess.run(init_command(tmp_path), check=True)
    assert tmp_path.stat().st_mode & 0o7777 == after


# Generated files in the chart.


@pytest.mark.parametrize("interval", ["15s", "5s"])
def test_the_rules_are_those_of_the_interval(interval: str, tmp_path: Path) -> None:
    spec = only("PrometheusRule", *VALUES["monitoring"], f"--set=scrapeInterval={interval}")["spec"]
    assert spec == yaml.safe_load((ROOT / f"deploy/prometheus/rules/{interval}.yml").read_text())


@pytest.mark.parametrize("name", ["run", "node"])
def test_a_dashboard_is_ours_and_fits_into_an_annotation(name: str) -> None:
    maps = [one for one in objects(*VALUES["monitoring"]) if one["kind"] == "ConfigMap"]
    (found,) = (one for one in maps if one["metadata"]["name"] == f"rankscope-dashboard-{name}")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"][f"rankscope-{name}.json"]) == json.loads(
        (ROOT / f"grafana/dashboards/{name}.json").read_text()
    )
    assert len(json.dumps(found)) < 256 * 1024


def configs_of_the_chart(targets: list[Manifest]) -> list[Manifest]:
    values = (*VALUES["monitoring"], "--set=scrapeInterval=5s")
    monitors = [one for one in objects(*values) if one["kind"] == "PodMonitor"]
    return [scrape_config(monitor, {"static_configs": targets}) for monitor in monitors]


def configs_of_the_page(targets: list[Manifest]) -> list[Manifest]:
    """Return the page's scrape configuration for Prometheus without the operator."""
    page = (ROOT / "docs/install/kubernetes.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (config,) = yaml.safe_load(block)["scrape_configs"]
    assert config.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    return [config | {"static_configs": targets, "scrape_interval": "5s"}]


@pytest.mark.parametrize("configs", [configs_of_the_chart, configs_of_the_page])
def test_targets_have_the_job_a_stable_name_and_no_pod_labels(
    tmp_path: Path, free_port: int, configs: Callable[[list[Manifest]], list[Manifest]]
) -> None:
    """Relabel simulated pods with a real Prometheus."""
    pods = [
        {"label_app_kubernetes_io_name": "rankscope", "label_app_kubernetes_io_instance": "rankscope"},
        {"label_rankscope": "sidecar"},
        {"label_rankscope": "sidecar", "phase": "Succeeded"},
        {"label_rankscope": "node"},
    ]
    targets = [
        {"targets": [f"127.0.0.1:{free_port}"], "labels": {**meta_labels(f"pod-{number}"), **pod_labels(labels)}}
        for number, labels in enumerate(pods)
    ]
    with running_exporter(free_port):
        prometheus = servers.prometheus(tmp_path, yaml.safe_dump({"scrape_configs": configs(targets)}))
        prometheus.start()
        try:
            assert wait_for(lambda: len(prometheus.query("up == 1")) == 2, 60)
            found = [one["metric"] for one in prometheus.query("up")]
        finally:
            prometheus.stop()
    assert sorted(found, key=lambda one: one["instance"]) == [
        {"__name__": "up", "job": "rankscope", "instance": "gpu-node-1"},
        {"__name__": "up", "job": "rankscope", "instance": "ml/pod-1"},
    ]


def meta_labels(name: str) -> dict[str, str]:
    found = {"pod_name": name, "pod_node_name": "gpu-node-1", "pod_phase": "Running", "namespace": "ml"}
    port = {"pod_container_name": "exporter", "pod_container_port_name": "rankscope"}
    return {f"__meta_kubernetes_{key}": value for key, value in (found | port).items()}


def pod_labels(labels: dict[str, str]) -> dict[str, str]:
    return {f"__meta_kubernetes_pod_{key}": value for key, value in labels.items()}


def test_the_pages_values_for_the_operators_chart_contain_our_alertmanager_configuration(tmp_path: Path) -> None:
    page = (ROOT / "docs/install/kubernetes.md").read_text()
    (command,) = re.findall(r"^\{ printf .*? > monitoring\.yml$", page, re.MULTILINE | re.DOTALL)
    script = command.replace("deploy/", f"{ROOT}/deploy/")
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True)
    values = yaml.safe_load((tmp_path / "monitoring.yml").read_text())
    assert values["alertmanager"]["config"] == yaml.safe_load(
        (ROOT / "deploy/alertmanager/alertmanager.yml").read_text()
    )
    assert values["grafana"]["sidecar"]["datasources"] == {"defaultDatasourceScrapeInterval": "15s"}


# Refused values.

REFUSED = {
    "image.repository=": "image.repository is required",
    "imagee.tag=1": "imagee",
    "image.pullPolicy=Sometimes": "pullPolicy",
    "scrapeInterval=30s": "scrapeInterval",
    "runDirectory.path=run/rankscope": "path",
    "runDirectory.path=/": "path",
    "runDirectory.tmpfs.size=64Mi": "size",
    "runDirectory.tmpfs.inodes=few": "inodes",
    "state.hostPath=state": "hostPath",
    "podAttribution=true": "podAttribution",
    "podAttribution.enabled=1": "enabled",
    "nodeSelector.gpu=true": "gpu",
    "extraArgs[0]=collector.xid": "extraArgs",
    "podMonitor.endpoint.relabelings[0].action=drop": "relabelings",
    "networkPolicy.to[0]=x": "to",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_wrong_value_is_refused_and_named(setting: str) -> None:
    command = [program("helm"), "template", "rankscope", str(CHART), IMAGE, f"--set={setting}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert REFUSED[setting] in done.stderr


@pytest.mark.parametrize(("release", "name"), [("rankscope", "rankscope"), ("gpu", "gpu-rankscope")])
def test_objects_are_named_by_the_release(release: str, name: str) -> None:
    command = [program("helm"), "template", release, str(CHART), IMAGE]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {one["metadata"]["name"] for one in yaml.safe_load_all(text) if one}
    assert names == {name}


def test_the_notes_name_the_selected_nodes_and_the_disabled_parts() -> None:
    command = [program("helm"), "install", "rankscope", str(CHART), IMAGE, "--dry-run=client"]
    notes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("NOTES:")[2]
    assert "nvidia.com/gpu.present=true" in notes
    assert re.findall(r"(\w+)\.enabled", notes) == ["podMonitor", "prometheusRule", "tmpfs"]
