"""The Helm chart, rendered by helm: validity, permissions, and the generated files in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deploy.helm import generate
from deploy.helm.generate import CHART, program, render
from deploy.prometheus.shipped import RULES
from testing import servers
from testing.exporter_process import exporter as running_exporter
from testing.http_server import exposition, http_server
from testing.pod_monitor import scrape_config
from testing.stack import wait_for

from rankscope import __version__
from rankscope.record.labels import MOST_LABELS
from rankscope.record.text import LABEL_LIMIT
from rankscope_exporter import registry
from rankscope_exporter.config import DEFAULT_PORT, Config, parse
from rankscope_exporter.ranks.collectors.findings import TEXT_LIMIT
from rankscope_exporter.ranks.network_ports import PORTS_LIMIT
from rankscope_exporter.ranks.share import LINE, ORDINARY_BYTES, OWNER_RANKS_LIMIT, RANKS_LIMIT
from rankscope_exporter.registry import GPU_METRICS, RANK_METRICS

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "helm"
IMAGE = "--set=image.repository=registry.example.com/rankscope-exporter"
GOLDEN = HERE / "everything.golden.yaml"
VALUES = {
    "default": (),
    "everything": (f"--values={HERE / 'everything.yaml'}",),
    "monitoring": ("--set=podMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true",),
    "sidecars": ("--set=podMonitor.sidecars.namespaces={ml,research},networkPolicy.sidecars=true",),
    "service monitor": ("--set=serviceMonitor.enabled=true,podMonitor.sidecars.anyNamespace=true",),
    "no run directory": ("--set=runDirectory.path=,hostPID=false",),
    "no root": ("--set=runDirectory.create=false,state.hostPath=/var/lib/rankscope,state.create=false",),
    "attribution": ("--set=podAttribution.enabled=true,state.hostPath=/var/lib/rankscope",),
    "tmpfs": ("--set=runDirectory.tmpfs.enabled=true",),
    "passwords": ("--set=webConfig.secretName=web",),
    "closed": ("--set=networkPolicy.enabled=false,nodeSelector=null,tolerations=null,resources=null",),
}
# 1.29 is the first with native sidecars, 1.25 the first with Pod Security admission, and the last one is the newest.
KUBERNETES = ("1.25", "1.29", "1.37")
OPERATOR_API = "monitoring.coreos.com/v1"

Manifest = dict[str, Any]


@cache
def rendered(*arguments: str) -> str:
    return render(IMAGE, *arguments)


def objects(*arguments: str) -> list[Manifest]:
    return [
        one for one in yaml.load_all(rendered(*arguments), yaml.CSafeLoader) if one
    ]  # the slow loader takes seconds


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
    assert kinds == {"DaemonSet", "Deployment", "NetworkPolicy", "Service", "ServiceAccount"}


def test_the_chart_has_the_packages_version_and_every_value_a_schema() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    del schema["properties"]["global"]
    assert {*undocumented(values, schema, schema["definitions"])} <= SHARED


# A sidecar's limits that are not named are those of `scrapeLimits`.
SHARED = {f"podMonitor.sidecars.scrapeLimits.label{name}Limit" for name in ("", "NameLength", "ValueLength")}


def undocumented(values: Manifest, schema: Manifest, definitions: Manifest, prefix: str = "") -> Iterator[str]:
    """Yield the names of values that the schema allows and values.yaml does not have. Helm checks the reverse."""
    for name, found in schema["properties"].items():
        described = definitions[found["$ref"].rpartition("/")[2]] if "$ref" in found else found
        if name not in values:
            yield f"{prefix}{name}"
        elif "properties" in described:
            yield from undocumented(values[name], described, definitions, f"{prefix}{name}.")


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


def test_without_init_containers_no_container_is_root_and_the_directories_must_exist() -> None:
    spec = pod(*VALUES["no root"])
    assert "initContainers" not in spec
    hosts = {volume["name"]: volume["hostPath"]["type"] for volume in spec["volumes"] if "hostPath" in volume}
    assert hosts == {"run": "Directory", "state": "Directory"}


def test_without_a_run_directory_the_pod_mounts_nothing_of_the_node() -> None:
    spec = pod(*VALUES["no run directory"])
    assert "initContainers" not in spec
    assert "hostPID" not in spec
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert settings(*VALUES["no run directory"]).run_dirs == (Path("/run/rankscope"),)


def test_the_state_belongs_to_the_user_of_the_values() -> None:
    values = "--set=state.hostPath=/var/lib/rankscope,securityContext.runAsUser=1001,securityContext.runAsGroup=1002"
    assert "chown -R 1001:1002 " in pod(values)["initContainers"][1]["command"][-1]


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


@pytest.mark.parametrize("interval", ["15s", "5s", "1m"])
def test_the_rules_are_the_same_for_every_interval(interval: str) -> None:
    spec = only("PrometheusRule", *VALUES["monitoring"], f"--set=scrapeInterval={interval}")["spec"]
    assert spec == yaml.safe_load(RULES.read_text())


def test_alerts_link_to_a_grafana_whose_address_is_known() -> None:
    spec = only("PrometheusRule", *VALUES["monitoring"], "--set=prometheusRule.grafanaUrl=https://g.example.com/")[
        "spec"
    ]
    alerts = [rule for group in spec["groups"] for rule in group["rules"]]
    assert {alert["annotations"].pop("dashboard_url").partition("/d/")[0] for alert in alerts} == {
        "https://g.example.com"
    }
    assert spec == yaml.safe_load(RULES.read_text())


@pytest.mark.parametrize("name", ["fleet", "cost", "run", "node"])
def test_a_dashboard_is_ours_and_fits_into_an_annotation(name: str) -> None:
    maps = [one for one in objects(*VALUES["monitoring"]) if one["kind"] == "ConfigMap"]
    (found,) = (one for one in maps if one["metadata"]["name"] == f"rankscope-dashboard-{name}")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"][f"rankscope-{name}.json"]) == json.loads(
        (ROOT / f"grafana/dashboards/{name}.json").read_text()
    )
    assert len(json.dumps(found)) < 256 * 1024


# What is scraped, by a real Prometheus and simulated pods.

SIDECAR = {"label_rankscope": "sidecar"}
DAEMONSET = {"label_app_kubernetes_io_name": "rankscope", "label_app_kubernetes_io_instance": "rankscope"}
ANALYZER = DAEMONSET | {"label_app_kubernetes_io_name": "rankscope-analyzer", "container_name": "analyzer"}


def configs_of_the_chart(targets: list[Manifest]) -> list[Manifest]:
    values = (*VALUES["monitoring"], *VALUES["sidecars"], "--set=scrapeInterval=5s")
    monitors = [one for one in objects(*values) if one["kind"] == "PodMonitor"]
    return [scrape_config(monitor, {"static_configs": targets}) for monitor in monitors]


def configs_of_the_page(targets: list[Manifest]) -> list[Manifest]:
    """Return the page's scrape configuration for Prometheus without the operator."""
    page = (ROOT / "docs/install/kubernetes.md").read_text()
    (block,) = re.findall(r"^```yaml\n(scrape_configs.*?)^```$", page, re.MULTILINE | re.DOTALL)
    configs = yaml.safe_load(block)["scrape_configs"]
    for config in configs:
        (discovery,) = config.pop("kubernetes_sd_configs")
        keep = {"action": "keep", "source_labels": ["__meta_kubernetes_namespace"]}
        keep["regex"] = "|".join(discovery["namespaces"]["names"])
        config["relabel_configs"] = [keep, *config["relabel_configs"]]
        config |= {"static_configs": targets, "scrape_interval": "5s", "scrape_timeout": "4s"}
    return list(configs)


def target(port: int, name: str, namespace: str, **labels: str) -> Manifest:
    """Return the target of a pod with the labels of Kubernetes discovery."""
    found = {"pod_name": name, "pod_node_name": "gpu-node-1", "pod_phase": "Running", "namespace": namespace}
    own = {"pod_container_name": "exporter", "pod_container_port_name": "rankscope"}
    meta = found | own | {f"pod_{key}": value for key, value in labels.items()}
    return {
        "targets": [f"127.0.0.1:{port}"],
        "labels": {f"__meta_kubernetes_{key}": value for key, value in meta.items()},
    }


@pytest.mark.parametrize("configs", [configs_of_the_chart, configs_of_the_page])
def test_targets_have_the_job_a_stable_name_and_no_labels_of_the_pod_except_its_namespace(
    tmp_path: Path, free_port: int, configs: Callable[[list[Manifest]], list[Manifest]]
) -> None:
    targets = [
        target(free_port, "rankscope-x7", "rankscope", **DAEMONSET),
        target(free_port, "rankscope-analyzer-y8", "rankscope", **ANALYZER),
        target(free_port, "train-0", "ml", **SIDECAR),
        target(free_port, "train-1", "ml", **SIDECAR, phase="Succeeded"),
        target(free_port, "train-2", "ml", label_rankscope="node"),
        target(free_port, "train-3", "other", **SIDECAR),
    ]
    prometheus = servers.prometheus(tmp_path, yaml.safe_dump({"scrape_configs": configs(targets)}))
    with running_exporter(free_port), prometheus:
        assert wait_for(lambda: len(prometheus.query("up == 1")) == 3, 60)
        found = [one["metric"] for one in prometheus.query("up")]
    assert sorted(found, key=lambda one: one["instance"]) == [
        {"__name__": "up", "job": "rankscope", "instance": "gpu-node-1"},
        {"__name__": "up", "job": "rankscope-sidecars", "instance": "ml/train-0", "pod_namespace": "ml"},
        {"__name__": "up", "job": "rankscope-analyzer", "instance": "rankscope-analyzer"},
    ]


VICTIM = [
    'rankscope_exporter_build_info{version="1"} 1',
    'rankscope_run_judged_info{run="train",owner="1000",by="gpu-node-1"} 1',
    'rankscope_gpu_up{gpu="0",uuid="GPU-1"} 1',
]
LIES = [
    *VICTIM[:2],
    'rankscope_rank_up{run="train",owner="1000",rank="0"} 1',
    'rankscope_finding_ratio{run="train",owner="1000",kind="hang",cause="outside_collective",rank="0",uuid="GPU-1"} 1',
    'rankscope_finding_evidence{run="train",owner="1000",kind="hang",name="stalled",pod_namespace="rankscope"} 900',
    'rankscope_gpu_up{gpu="0",uuid="GPU-1"} 0',
    'node_filesystem_avail_bytes{instance="gpu-node-1"} 0',
]


@pytest.mark.parametrize("configs", [configs_of_the_chart, configs_of_the_page])
def test_a_lying_pod_alerts_only_as_its_namespace_and_not_about_gpus(
    tmp_path: Path, configs: Callable[[list[Manifest]], list[Manifest]]
) -> None:
    rules = [str(RULES)]
    with http_server(exposition(VICTIM)) as honest, http_server(exposition(LIES)) as liar:
        targets = [
            target(honest, "rankscope-x7", "rankscope", **DAEMONSET),
            target(liar, "liar-0", "ml", **SIDECAR),
            target(liar, "liar-1", "other", **SIDECAR),
        ]
        configuration = {"rule_files": rules, "scrape_configs": configs(targets)}
        with servers.prometheus(tmp_path, yaml.safe_dump(configuration)) as prometheus:
            assert wait_for(lambda: prometheus.query('ALERTS{alertname="RankscopeRankStuck"}'), 60)
            alerts = [one["metric"] for one in prometheus.query("ALERTS")]
            lies = [
                one["metric"]
                for one in prometheus.query('{instance!="gpu-node-1",instance!="",__name__!~"up|scrape_.*"}')
            ]
            gpus = [one["metric"]["instance"] for one in prometheus.query('{__name__=~"rankscope_gpu.*|node_.*"}')]
    assert {(one["alertname"], one["run"], one["owner"]) for one in alerts} == {
        ("RankscopeRankStuck", "train", "ml/1000")
    }
    from_liar = [one for one in lies if one["__name__"].startswith("rankscope_")]
    assert {one["__name__"] for one in from_liar} == {
        *("rankscope_exporter_build_info", "rankscope_run_judged_info", "rankscope_rank_up"),
        *("rankscope_finding_ratio", "rankscope_finding_evidence"),
    }
    assert {(one["instance"], one["pod_namespace"]) for one in from_liar} == {("ml/liar-0", "ml")}
    assert not any("uuid" in one for one in from_liar)
    assert gpus == ["gpu-node-1"]


@pytest.mark.parametrize("configs", [configs_of_the_chart, configs_of_the_page])
def test_a_scrape_of_more_than_an_exporter_can_show_fails(
    tmp_path: Path, configs: Callable[[list[Manifest]], list[Manifest]]
) -> None:
    most = limits("rankscope-sidecars")["sampleLimit"]
    series = [f'rankscope_rank_up{{rank="{number}"}} 1' for number in range(most + 1)]
    with http_server(exposition(series[1:])) as within, http_server(exposition(series)) as above:
        targets = [target(within, "within", "ml", **SIDECAR), target(above, "above", "ml", **SIDECAR)]
        with servers.prometheus(tmp_path, yaml.safe_dump({"scrape_configs": configs(targets)})) as prometheus:
            assert wait_for(lambda: len(prometheus.query("up")) == 2, 60)
            up = {one["metric"]["instance"]: one["value"][1] for one in prometheus.query("up")}
            stored = {one["metric"]["instance"] for one in prometheus.query("count by (instance) (rankscope_rank_up)")}
    assert up == {"ml/within": "1", "ml/above": "0"}
    assert stored == {"ml/within"}


def test_a_service_monitor_scrapes_like_the_pod_monitor() -> None:
    without = "--set=analyzer.enabled=false"
    service = only("Service", *VALUES["service monitor"], without)
    by_pod = only("PodMonitor", "--set=podMonitor.enabled=true", without)
    by_service = only("ServiceMonitor", *VALUES["service monitor"])
    assert by_service["spec"].pop("endpoints") == by_pod["spec"].pop("podMetricsEndpoints")
    assert by_service["spec"] == by_pod["spec"]
    assert by_service["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"] == by_service["spec"]["selector"]["matchLabels"]
    (port,) = service["spec"]["ports"]
    assert (port["name"], port["targetPort"], port["port"]) == ("rankscope", "rankscope", DEFAULT_PORT)


def limits(name: str) -> Manifest:
    found = objects(*VALUES["monitoring"], *VALUES["sidecars"])
    monitors = {one["metadata"]["name"]: one for one in found if one["kind"] == "PodMonitor"}
    return {key: value for key, value in monitors[name]["spec"].items() if key.endswith("Limit")}


def megabytes(size: str) -> int:
    return int(size.removesuffix("MB")) * 2**20


def test_an_exporter_cannot_show_more_than_its_scrape_may_have() -> None:
    """The page of ranks is limited by share.py, in bytes. GPUs, ports and findings get generous estimates."""
    node, pod = limits("rankscope"), limits("rankscope-sidecars")
    others = 16 * 260 + PORTS_LIMIT * 10 + 2_000  # series of 16 GPUs (docs/metrics.md, and DCGM's), ports, exporter
    for found, ranks, extra in ((node, RANKS_LIMIT, others), (pod, OWNER_RANKS_LIMIT, 2_000)):
        findings = ranks * 20
        assert found["sampleLimit"] >= ranks * ORDINARY_BYTES // LINE + findings + extra
        assert megabytes(found["bodySizeLimit"]) >= ranks * ORDINARY_BYTES + (findings + extra) * 300
        most = max(len(one.labels) for one in (*GPU_METRICS, *RANK_METRICS, *registry.EXPORTER_METRICS))
        assert found["labelLimit"] >= most + MOST_LABELS + len(("__name__", "job", "instance", "pod_namespace", "le"))
        assert found["labelNameLengthLimit"] >= 40 + len("exported_")
        assert found["labelValueLengthLimit"] >= max(LABEL_LIMIT * len("\N{GRINNING FACE}".encode()), TEXT_LIMIT)


def test_the_pages_values_for_the_operators_chart_have_our_alertmanager_configuration_and_texts(tmp_path: Path) -> None:
    page = (ROOT / "docs/install/kubernetes.md").read_text()
    (command,) = re.findall(r"^\{ printf .*? > monitoring\.yml$", page, re.MULTILINE | re.DOTALL)
    script = command.replace("deploy/", f"{ROOT}/deploy/")
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True)
    values = yaml.safe_load((tmp_path / "monitoring.yml").read_text())
    assert values["alertmanager"]["config"] == yaml.safe_load(
        (ROOT / "deploy/alertmanager/alertmanager.yml").read_text()
    )
    templates = values["alertmanager"]["templateFiles"]
    assert templates == {"rankscope.tmpl": (ROOT / "deploy/alertmanager/rankscope.tmpl").read_text()}
    assert values["grafana"]["sidecar"]["datasources"] == {"defaultDatasourceScrapeInterval": "15s"}


# Refused values.

REFUSED = {
    "image.repository=": "image.repository is required",
    "imagee.tag=1": "imagee",
    "image.pullPolicy=Sometimes": "pullPolicy",
    "scrapeInterval=2m": "scrapeInterval",
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
    "podMonitor.sidecars=true": "sidecars",
    "podMonitor.sidecars.namespaces={*}": "namespaces",
    "podMonitor.sidecars.namespaces={ml},podMonitor.sidecars.anyNamespace=true": "either namespaces or anyNamespace",
    "networkPolicy.sidecars=true": "networkPolicy.sidecars needs podMonitor.sidecars.namespaces",
    "podMonitor.endpoint.honorLabels=true": "honorLabels",
    "podMonitor.enabled=true,serviceMonitor.enabled=true": "enable one",
    "scrapeLimits.sampleLimit=many": "sampleLimit",
    "image.digest=latest": "digest",
    "service.type=ExternalName": "type",
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
    assert names == {name, f"{name}-nodes", f"{name}-analyzer"}


def test_the_analyzer_asks_the_exporters_and_is_not_one_of_them() -> None:
    found = objects("--set=podMonitor.enabled=true", '--set-json=networkPolicy.from=[{"podSelector": {}}]')
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in found}
    exporters = by_name["DaemonSet", "rankscope"]["spec"]["selector"]["matchLabels"]
    deployment = by_name["Deployment", "rankscope-analyzer"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert by_name["Service", "rankscope-nodes"]["spec"]["selector"] == exporters
    assert not exporters.items() <= labels.items()
    assert not exporters.items() <= by_name["Service", "rankscope-nodes"]["metadata"]["labels"].items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "--analyze=dns:rankscope-nodes.rankscope.svc:10417"
    (_, analyzer) = by_name["NetworkPolicy", "rankscope"]["spec"]["ingress"][0]["from"]
    assert analyzer["podSelector"]["matchLabels"].items() <= labels.items()
    monitor = by_name["PodMonitor", "rankscope-analyzer"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    replaced = {one["targetLabel"]: one["replacement"] for one in monitor["podMetricsEndpoints"][0]["relabelings"][:2]}
    assert replaced == {"job": "rankscope-analyzer", "instance": "rankscope-analyzer"}


def test_with_passwords_the_analyzer_needs_targets() -> None:
    kinds = {one["kind"] for one in objects("--set=webConfig.secretName=web")}
    assert "Deployment" not in kinds
    targets = "--set=analyzer.targets=dns+https:nodes:10417"
    assert only("Deployment", "--set=webConfig.secretName=web", targets)


def test_names_the_namespace_and_the_account_can_be_replaced() -> None:
    every = (*VALUES["monitoring"], *VALUES["sidecars"], "--set=service.enabled=true")
    found = objects(*every, "--set=fullnameOverride=gpus,namespaceOverride=watch,nameOverride=exporter")
    assert {one["metadata"]["name"].partition("-")[0] for one in found} == {"gpus"}
    assert {one["metadata"]["namespace"] for one in found} == {"watch", "ml", "research"}
    assert {one["metadata"]["labels"]["app.kubernetes.io/name"] for one in found} == {"exporter", "exporter-analyzer"}
    assert only("ServiceAccount", "--set=serviceAccount.name=own")["metadata"]["name"] == "own"
    assert pod("--set=serviceAccount.name=own")["serviceAccountName"] == "own"
    assert pod("--set=serviceAccount.create=false")["serviceAccountName"] == "default"
    assert not [one for one in objects("--set=serviceAccount.create=false") if one["kind"] == "ServiceAccount"]


def test_a_digest_replaces_the_tag() -> None:
    digest = f"sha256:{'0123456789abcdef' * 4}"
    image = exporter(f"--set=image.tag=1.2.3,image.digest={digest}")["image"]
    assert image == f"registry.example.com/rankscope-exporter@{digest}"


def test_the_notes_name_the_selected_nodes_and_the_disabled_parts() -> None:
    command = [program("helm"), "install", "rankscope", str(CHART), IMAGE, "--dry-run=client"]
    notes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("NOTES:")[2]
    assert "nvidia.com/gpu.present=true" in notes
    assert re.findall(r"(\w+)\.enabled", notes) == ["podMonitor", "prometheusRule", "tmpfs"]
    assert "podMonitor.sidecars.namespaces is empty" in notes
