"""Run deploy/ansible's role twice against a booted Debian 12, over ssh: the second run changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bcrypt
from testing.report import ROOT, Check
from validation.packages.systems import DEBIAN_12, BootedSystem, bootstrap

PLAYBOOK = ROOT / "deploy/ansible/site.yml"
WAIT = "curl --silent --output /dev/null --write-out '%{http_code} ' --retry 10 --retry-delay 1 --retry-connrefused"
PASSWORD = "/run/credentials/rankscope-analyzer.service/password"
TARGETS = """for _ in $(seq 30); do
    curl --silent http://localhost:10418/metrics | grep 'analyzer_targets{state="up"} 1.0' && break; sleep 1
done"""
RECAP = re.compile(r"ok=\d+ +changed=(\d+) +unreachable=0 +failed=0")


def check(package: Path, scratch: Path) -> list[Check]:
    """Return the result of ansible-lint, and the changes of two runs of the role."""
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "ANSIBLE_HOST_KEY_CHECKING": "False"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        directory = PLAYBOOK.parent
        return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)

    lint = run(programs / "ansible-lint", "--offline", "-q", ".")
    bootstrap(DEBIAN_12)
    with BootedSystem(DEBIAN_12, [], scratch / "ansible.log") as node:
        command = [programs / "ansible-playbook", *_arguments(node, package, scratch)]
        runs = [run(*command), run(*command)]
        ask = (
            f"{WAIT} http://localhost:10417/-/healthy; {WAIT} --user prometheus:secret http://localhost:10417/-/healthy"
        )
        answers = node.run(ask).stdout.split()
        targets = node.run(TARGETS).stdout.strip()
    changed = [int(found[1]) if (found := RECAP.search(one.stdout)) else -1 for one in runs]
    failed = "".join(one.stdout + one.stderr for one in runs)[-300:] if -1 in changed else ""
    return [
        Check(
            "ansible-lint has no finding",
            lint.returncode == 0,
            (lint.stdout + lint.stderr).strip()[-300:] if lint.returncode else "nothing",
        ),
        Check("the role starts the service, with a password", answers == ["401", "200"], failed or " ".join(answers)),
        Check("the analyzer asks the exporter, with its password", targets.endswith(" 1.0"), targets),
        Check("a second run changes nothing", changed[1] == 0, f"{changed[0]} changes, then {changed[1]}"),
    ]


def _arguments(node: BootedSystem, package: Path, scratch: Path) -> list[str | Path]:
    """Give this machine ssh access to the node, and return the playbook's arguments for it."""
    key = scratch / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text().strip()
    node.do(f"mkdir -p /root/.ssh; echo '{public}' > /root/.ssh/authorized_keys")
    inventory = scratch / "inventory.ini"
    host = f"{node.ADDRESS} ansible_user=root ansible_ssh_private_key_file={key}"
    inventory.write_text(f"[gpu_nodes]\n{host}\n[analyzer]\n{node.ADDRESS}\n")
    web = scratch / "web.yml"
    web.write_text(f"basic_auth_users: {{prometheus: '{bcrypt.hashpw(b'secret', bcrypt.gensalt(10)).decode()}'}}\n")
    password = scratch / "password"
    password.write_text("prometheus:secret\n")
    variables = {
        "rankscope_package": str(package),
        "rankscope_web_files": {"web.yml": str(web)},
        "rankscope_analyzer_files": {"password": str(password)},
        "rankscope_analyzer_options": f"--analyze.basic-auth-file={PASSWORD}",
    }
    return ["-i", inventory, PLAYBOOK, "-e", json.dumps(variables)]
