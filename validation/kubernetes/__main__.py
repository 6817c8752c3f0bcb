"""Install the chart on a real Kubernetes, train in pods, and check the notification about a slow rank.

    python -m validation.kubernetes --save

The cluster has one node without GPUs: API server, controller manager, scheduler, kubelet and containerd, compiled from
Debian's source of Kubernetes 1.20.2 on the first run. The image is the checkout's, built from its Dockerfile on
Debian's Python. The host runs Prometheus, which relabels the pods like the chart's PodMonitors, Alertmanager, and a
webhook. Each Job is the one of `examples/kubernetes` with the test job of two ranks, which run as uid 1000; torch comes
from the host's virtual environment. Two namespaces are listed for sidecars. In one of them and in a third, a pod
pretends to be a sidecar and makes up a critical finding about the run on the node.

Limits of this cluster: Kubernetes 1.20 has no native sidecars, so the exporter in the pod is an ordinary container and
its Job does not complete by itself. There are no DNS, no Services, no enforced network policies and no Pod Security
admission. Debian's Prometheus has no Kubernetes discovery: a file has the targets, with the labels that discovery would
set. VictoriaMetrics has discovery, and must find the same targets. The Prometheus operator's kinds are stored without
an operator, and the scrape configuration is generated from the PodMonitors as the operator does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from deploy.helm.generate import CHART
from deploy.prometheus.shipped import alertmanager_config
from testing import report, servers
from testing.pod_monitor import scrape_config
from testing.report import Check
from testing.stack import wait_for
from testing.webhook import WebhookReceiver
from validation.kubernetes.cluster import IMAGE_NAME, NODE, Cluster, Manifest, running
from validation.kubernetes.discovery import Discovery
from validation.kubernetes.lies import LISTED, UNLISTED, check_lies, is_made_up
from validation.kubernetes.training import NAMESPACE, PodsJob

DIRECTORY = report.ROOT / ".kubernetes"
RELEASE, CHART_NAMESPACE = "rankscope", "rankscope"
OPERATOR = ("podmonitors PodMonitor", "prometheusrules PrometheusRule")
INSTALL = (
    f"--set=podMonitor.sidecars.namespaces={{{NAMESPACE},{LISTED}}}",
    "--set=podMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true,scrapeInterval=5s",
    f"--set=image.repository={IMAGE_NAME.partition(':')[0]},image.tag={IMAGE_NAME.partition(':')[2]}",
)
KINDS = "daemonset,pod,configmap,secret,serviceaccount,networkpolicy,podmonitor,prometheusrule"
STATE = "/run/rankscope-state"
PATTERNS = {"node": "on-the-node", "sidecar": "in-the-pods"}
LIST_PODS = """
from pathlib import Path
from rankscope_exporter.gpu.allocation import pod_resources as p
answer = p.PodResources(Path("/var/lib/kubelet/pod-resources/kubelet.sock"))._list()
print(*(p._text(pod, 1) for pod in p._all(answer, 1)))
"""
ALERT = "RankscopeRankZeroLagging"
EXTRA = {"post": 80.0}  # milliseconds after each step
READY_WITHIN, SEEN_WITHIN, NOTIFIED_WITHIN, QUIET_FOR = "180s", 120.0, 240.0, 45.0
QUIET_AFTER = 90.0  # seconds: an exporter is down after eight scrapes


class Outcome(NamedTuple):
    """The result of one job's fault."""

    run: str
    labels: dict[str, str]
    """Labels of the first alert; empty without one."""
    summary: str
    seconds: float | None
    """Seconds from the fault to the notification."""
    false: list[str]
    """Alerts before the fault."""


def main() -> int:
    """Run everything and publish. Return 1 if a check fails."""
    parser = report.parser(__doc__, prog="make kubernetes")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="directory of the cluster (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankscope-kubernetes-") as name, running(options.directory) as cluster:
        checks, outcomes = observe(cluster, Path(name))
    body = [report.verdict(checks), _table(outcomes)]
    figures = {"checks": [one.__dict__ for one in checks], "outcomes": [one._asdict() for one in outcomes]}
    report.Report("kubernetes", "The chart on Kubernetes", __doc__, "every check holds", body, figures).publish(
        options.save
    )
    return 0 if all(check.holds for check in checks) else 1


def observe(cluster: Cluster, directory: Path) -> tuple[list[Check], list[Outcome]]:
    install(cluster)
    checks = [check_user(cluster, "the exporter runs without root and capabilities, with a seccomp filter", 65534)]
    outcomes = []
    with ExitStack() as started:
        prometheus, victoria, webhook = start_monitoring(cluster, directory, started)
        for pattern, run in PATTERNS.items():
            job = PodsJob(cluster, directory / run, pattern, run)
            job.start()
            try:
                checks += [*check_ranks(prometheus, pattern, job), check_discovery(prometheus, victoria, job)]
                if pattern == "node":
                    checks += [check_upgrade(cluster, prometheus, job), *check_lies(cluster, prometheus, webhook, job)]
                outcomes.append(inject_fault(prometheus, webhook, job))
            finally:
                job.terminate()
            checks += [check_notification(outcomes[-1]), check_silence(webhook, job)]
    checks += [*check_options(cluster), *check_uninstall(cluster)]
    return checks, outcomes


def install(cluster: Cluster) -> None:
    """Register the operator's kinds, and install the chart until it is ready."""
    cluster.apply(*(definition(*names.split()) for names in OPERATOR))
    cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    for name in (CHART_NAMESPACE, NAMESPACE, LISTED, UNLISTED):
        cluster.kubectl("create", "namespace", name)
    release("install", cluster)


def release(command: str, cluster: Cluster, *values: str) -> None:
    """Install or upgrade the chart, and wait until all of it is ready. Raises RuntimeError."""
    chart = [RELEASE, str(CHART), f"--namespace={CHART_NAMESPACE}", *INSTALL, *values]
    cluster.helm(command, *chart, "--wait", f"--timeout={READY_WITHIN}")


def definition(plural: str, kind: str) -> Manifest:
    """Return a kind of the Prometheus operator, with any fields."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


def check_user(cluster: Cluster, check: str, uid: int) -> Check:
    """Return whether the DaemonSet's process has these privileges in the kernel."""
    (pod,) = _ready(cluster)
    process = cluster.process(pod, "exporter")
    found = f"uid {process.uid}, capabilities {process.capabilities:#x}, seccomp mode {process.seccomp}"
    return Check(check, process == (uid, 0, 2), found)


def _ready(cluster: Cluster) -> list[Manifest]:
    pods = cluster.items("pod", "-n", CHART_NAMESPACE)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def start_monitoring(
    cluster: Cluster, directory: Path, started: ExitStack
) -> tuple[servers.Prometheus, servers.Prometheus, WebhookReceiver]:
    """Start the monitoring on the host, configured with the chart's objects from the API server."""
    webhook = started.enter_context(WebhookReceiver())
    alertmanager = servers.alertmanager(directory, alertmanager_config(webhook.url))
    (rule,) = cluster.items("prometheusrule", "-n", CHART_NAMESPACE)
    (directory / "rules.yml").write_text(yaml.safe_dump(rule["spec"], sort_keys=False))
    discovery = started.enter_context(Discovery(cluster, directory / "targets.json"))
    monitors = cluster.items("podmonitor", "-n", CHART_NAMESPACE)
    configuration = {
        "rule_files": [str(directory / "rules.yml")],
        "scrape_configs": [scrape_config(monitor, discovery.configuration) for monitor in monitors],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager.address]}]}]},
    }
    prometheus = servers.prometheus(directory, yaml.safe_dump(configuration))
    discovering = [scrape_config(monitor, cluster.discovery()) for monitor in monitors]
    victoria = victoria_metrics(cluster, directory, {"scrape_configs": discovering})
    for server in (alertmanager, prometheus, victoria):
        started.enter_context(server)
    return prometheus, victoria, webhook


def victoria_metrics(cluster: Cluster, directory: Path, configuration: Manifest) -> servers.Prometheus:
    """Return a server with Prometheus' API and Kubernetes discovery."""
    (directory / "victoria.yml").write_text(yaml.safe_dump(configuration))
    url = f"http://127.0.0.1:{servers.free_port()}"
    arguments = [
        str(cluster.programs / "victoria-metrics"),
        f"-promscrape.config={directory / 'victoria.yml'}",
        "-promscrape.config.strictParse=false",  # it lacks some limits of a scrape
        f"-storageDataPath={directory / 'victoria'}",
        f"-httpListenAddr={url.removeprefix('http://')}",
        "-search.latencyOffset=1s",
    ]
    return servers.Prometheus("victoria-metrics", arguments, url, directory / "victoria.log", ready="/health")


def check_ranks(prometheus: servers.Prometheus, pattern: str, job: PodsJob) -> list[Check]:
    """Return whether Prometheus has both ranks, from which exporter, and with which labels."""
    job.wait_until_training()
    own = f'{{run="{job.run}"}}'
    wait_for(lambda: len(prometheus.query(f"rankscope_rank_up{own} == 1")) == job.ranks, SEEN_WITHIN)
    ranks = [one["metric"] for one in prometheus.query(f"rankscope_rank_info{own}")]
    labels = [one["metric"] for one in prometheus.query(f"rankscope_rank_labels_info{own}")]
    pods = {one.get("k8s_pod") for one in labels}
    targets = [one["metric"] for one in prometheus.query("up == 1")]
    instances = {NODE} if pattern == "node" else {f"{NAMESPACE}/{pod}" for pod in pods}
    known = sorted(f"{one.get('k8s_namespace')}/{one.get('k8s_pod')}" for one in labels)
    return [
        Check(
            f"{job.run}: both ranks are seen, with the node's name",
            {(one["rank"], one["node"]) for one in ranks} == {("0", NODE), ("1", NODE)},
            ", ".join(sorted(f"rank {one['rank']} on {one['node']}" for one in ranks)),
        ),
        Check(
            f"{job.run}: each rank has its own pod and namespace",
            len(pods) == job.ranks and {one.get("k8s_namespace") for one in labels} == {NAMESPACE},
            ", ".join(known),
        ),
        Check(
            f"{job.run}: its series come from the {pattern}",
            {(one["instance"], one["owner"]) for one in ranks} == {(name, job.owner) for name in instances}
            and all(set(one) <= LABELS_OF_UP for one in targets),
            ", ".join(sorted({f"{one['instance']}, owner {one['owner']}" for one in ranks})),
        ),
    ]


LABELS_OF_UP = {"__name__", "job", "instance", "pod_namespace"}


def check_discovery(prometheus: servers.Prometheus, victoria: servers.Prometheus, job: PodsJob) -> Check:
    """Return whether Kubernetes discovery finds the targets that Prometheus has from the file."""

    def targets(server: servers.Prometheus) -> set[tuple[str, str]]:
        return {(one["metric"]["job"], one["metric"]["instance"]) for one in server.query("up == 1")}

    wait_for(lambda: targets(victoria) == targets(prometheus), SEEN_WITHIN)
    found = targets(victoria)
    instances = ", ".join(sorted(instance for _, instance in found))
    return Check(
        f"{job.run}: Kubernetes discovery finds the same targets", found == targets(prometheus) != set(), instances
    )


def check_upgrade(cluster: Cluster, prometheus: servers.Prometheus, job: PodsJob) -> Check:
    """Upgrade the chart while ranks train, and return whether a new exporter with the same values shows them."""
    (before,) = _ready(cluster)
    chart = [RELEASE, str(CHART), f"--namespace={CHART_NAMESPACE}", "--reset-then-reuse-values"]
    cluster.helm("upgrade", *chart, "--set-string=podAnnotations.upgraded=yes", "--wait", f"--timeout={READY_WITHIN}")
    (after,) = _ready(cluster)
    ranks = (
        f'rankscope_rank_up{{run="{job.run}",instance="{NODE}"}} == 1 and timestamp(rankscope_rank_up) > {time.time()}'
    )
    wait_for(lambda: len(prometheus.query(ranks)) == job.ranks, SEEN_WITHIN)
    seen = len(prometheus.query(ranks))
    (old,), (new,) = before["spec"]["containers"], after["spec"]["containers"]
    is_new = before["metadata"]["name"] != after["metadata"]["name"]
    is_same = (old["image"], old["args"]) == (new["image"], new["args"])
    found = f"{'new' if is_new else 'old'} pod, {'same' if is_same else 'other'} image and flags, {seen} ranks"
    check = f"{job.run}: helm upgrade replaces the exporter, keeps its values, and shows the ranks that train"
    return Check(check, is_new and is_same and seen == job.ranks, found)


def inject_fault(prometheus: servers.Prometheus, webhook: WebhookReceiver, job: PodsJob) -> Outcome:
    """Train for a while, slow down rank 0, and wait for the notification."""
    time.sleep(QUIET_FOR)
    own = {"run": job.run, "owner": job.owner}
    false = [one.name for one in webhook.firing() if one.labels.items() >= own.items()]
    onset = job.change(ranks={0: EXTRA})

    def firing() -> list[Any]:
        return [one for one in webhook.firing() if one.labels.items() >= own.items() and one.received >= onset]

    wait_for(firing, NOTIFIED_WITHIN)
    for one in firing()[:1]:
        seconds = round(one.received - onset, 1)
        return Outcome(job.run, one.labels, one.annotations["summary"], seconds, false)
    return Outcome(job.run, {}, json.dumps(prometheus.query("ALERTS"))[:200], None, false)


def check_notification(outcome: Outcome) -> Check:
    """Return whether the right alert was notified, and no other."""
    labels = outcome.labels
    is_right = (
        labels.get("alertname") == ALERT and labels.get("node") == NODE and labels.get("job") in (None, "rankscope")
    )
    found = f"{labels.get('alertname', 'nothing')} on {labels.get('node')}; before the fault: {outcome.false or 'none'}"
    return Check(f"{outcome.run}: rank 0 is notified, and nothing before", is_right and not outcome.false, found)


def check_silence(webhook: WebhookReceiver, job: PodsJob) -> Check:
    """Return whether the end of the job, whose pods are deleted, causes no notification."""
    before = len(webhook.notifications)
    time.sleep(QUIET_AFTER)
    found = sorted(
        {
            f"{one.name} {one.labels.get('instance', '')}"
            for one in webhook.notifications[before:]
            if one.is_firing and not is_made_up(one)
        }
    )
    return Check(f"{job.run}: its end is not notified", not found, ", ".join(found) or "nothing")


def check_options(cluster: Cluster) -> list[Check]:
    """Enable the options that are off by default, and check them."""
    values = f"--set=runDirectory.tmpfs.enabled=true,state.hostPath={STATE}"
    release("upgrade", cluster, values)
    checks = [check_run_directory(cluster), check_state(cluster, "the exporter's user", 65534)]
    release("upgrade", cluster, values, "--set=podAttribution.enabled=true")
    pods = run_in_exporter(cluster, "python", "-c", LIST_PODS)
    return [
        *checks,
        check_state(cluster, "root", 0),
        check_user(cluster, "with pod attribution it is uid 0 without capabilities", 0),
        Check("the kubelet lists its pods to it", _ready(cluster)[0]["metadata"]["name"] in pods, pods[:200]),
    ]


def run_in_exporter(cluster: Cluster, *command: str) -> str:
    """Return the output of a command in the exporter's container."""
    (pod,) = _ready(cluster)
    name = pod["metadata"]["name"]
    return cluster.kubectl("-n", CHART_NAMESPACE, "exec", name, "-c", "exporter", "--", *command).strip()


def check_run_directory(cluster: Cluster) -> Check:
    """Return whether the run directory is a separate tmpfs."""
    mount = run_in_exporter(cluster, "stat", "-f", "-c", "%T, %c inodes", "/run/rankscope")
    mode = run_in_exporter(cluster, "stat", "-c", "%a", "/run/rankscope")
    is_right = (mount, mode) == ("tmpfs, 4096 inodes", "1777")
    return Check("the run directory is a limited tmpfs that all users may write to", is_right, f"{mount}, mode {mode}")


def check_state(cluster: Cluster, user: str, uid: int) -> Check:
    """Return whether the exporter's state is in its own directory on the node."""
    found = run_in_exporter(cluster, "stat", "-c", "%u %a %n", "/var/lib/rankscope")
    is_right = found == f"{uid} 700 /var/lib/rankscope"
    return Check(f"its state is on the node and belongs to {user}", is_right, found)


def check_uninstall(cluster: Cluster) -> list[Check]:
    """Uninstall the chart, and return whether the cluster has any of its objects left."""
    cluster.helm("uninstall", RELEASE, f"--namespace={CHART_NAMESPACE}", "--wait")
    wait_for(lambda: not _leftover_objects(cluster), 60)
    left = _leftover_objects(cluster)
    return [
        Check(
            "helm uninstall leaves no object", not left, ", ".join(left) or "nothing; the node keeps its run directory"
        )
    ]


def _leftover_objects(cluster: Cluster) -> list[str]:
    selectors = ("app.kubernetes.io/name=rankscope", "owner=helm")
    return [
        name
        for selector in selectors
        for name in cluster.kubectl("get", KINDS, "-A", "-o", "name", "-l", selector).split()
    ]


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = [(one.run, one.summary, one.labels.get("cause", ""), one.seconds) for one in outcomes]
    return report.table(("run", "notification", "cause", "seconds after the fault"), rows)


if __name__ == "__main__":
    sys.exit(main())
