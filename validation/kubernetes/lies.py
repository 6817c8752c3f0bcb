"""Pods that pretend to be sidecars and make up a critical finding about another user's run."""

from __future__ import annotations

import time
import urllib.request

from testing import servers
from testing.report import Check
from testing.stack import wait_for
from testing.webhook import Notification, WebhookReceiver
from validation.kubernetes.cluster import IMAGE_NAME, Cluster, Manifest
from validation.kubernetes.training import PodsJob

LISTED, UNLISTED = "research", "unlisted"
"""Namespaces of the pods. Only the first one is in the chart's values."""
PORT = 10417
NAME = "liar"
READY_WITHIN, NOTIFIED_WITHIN, QUIET_FOR = "180s", 120.0, 30.0
SERVE = """
import http.server, os
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(os.environ["LIES"].encode())
http.server.HTTPServer(("", 10417), Page).serve_forever()
"""


def lies(run: str, owner: str) -> str:
    """Return a page that says: an exporter has a rank of this run and judges it, and the run hangs."""
    of_run = f'run="{run}",owner="{owner}"'
    return "\n".join(
        (
            'rankscope_exporter_build_info{version="1"} 1',
            f'rankscope_run_judged_info{{{of_run},by="gpu-node-1"}} 1',
            f'rankscope_rank_up{{{of_run},rank="0"}} 1',
            f'rankscope_finding_ratio{{{of_run},kind="hang",cause="outside_collective",rank="0"}} 1',
            f'rankscope_finding_evidence{{{of_run},kind="hang",name="stalled",pod_namespace="rankscope"}} 900\n',
        )
    )


def liar(namespace: str, page: str) -> Manifest:
    """Return a pod that the PodMonitor for sidecars selects, in this namespace, and that shows the page."""
    container = {
        "name": NAME,
        "image": IMAGE_NAME,
        "command": ["python", "-c", SERVE],
        "env": [{"name": "LIES", "value": page}],
        "ports": [{"name": "rankscope", "containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/metrics", "port": PORT}},
        "securityContext": {"runAsUser": 65534, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME, "namespace": namespace, "labels": {"rankscope": "sidecar"}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
    }


def answers(cluster: Cluster, namespace: str) -> bool:
    """Return whether the pod's page can be read from this machine."""
    (pod,) = cluster.items("pod", "-n", namespace)
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{PORT}/metrics", timeout=10) as page:
        return b"rankscope_finding_ratio" in page.read()


def is_made_up(notification: Notification) -> bool:
    """Return whether the alert is about a run of the pods' namespace."""
    return notification.labels.get("owner", "").startswith(f"{LISTED}/")


def check_lies(cluster: Cluster, prometheus: servers.Prometheus, webhook: WebhookReceiver, job: PodsJob) -> list[Check]:
    """Return whether pods that make up findings about the run affect only a run of their own namespace."""
    page = lies(job.run, job.owner)
    cluster.apply(liar(LISTED, page), liar(UNLISTED, page))
    try:
        for namespace in (LISTED, UNLISTED):
            cluster.kubectl(
                "-n", namespace, "wait", "--for=condition=Ready", f"pod/{NAME}", f"--timeout={READY_WITHIN}"
            )
        wait_for(lambda: any(is_made_up(one) for one in webhook.firing()), NOTIFIED_WITHIN)
        time.sleep(QUIET_FOR)
        targets = sorted(one["metric"]["instance"] for one in prometheus.query(f'up{{instance=~".+/{NAME}"}} == 1'))
        answering = answers(cluster, UNLISTED)
    finally:
        for namespace in (LISTED, UNLISTED):
            cluster.kubectl("-n", namespace, "delete", "pod", NAME, "--timeout=60s")
    owners = sorted({one.labels["owner"] for one in webhook.firing() if one.labels.get("run") == job.run})
    return [
        Check(
            "a lying pod in a namespace that is not listed is not scraped",
            targets == [f"{LISTED}/{NAME}"] and answering,
            f"it answers: {'yes' if answering else 'no'}; scraped: {', '.join(targets) or 'none'}",
        ),
        Check(
            "a lying pod in a listed namespace alerts only about a run of its own namespace",
            owners == [f"{LISTED}/{job.owner}"],
            f"alerts about {job.run} of owner {', '.join(owners) or 'none'}; the run's owner is {job.owner}",
        ),
    ]
