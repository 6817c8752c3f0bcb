"""Run deploy/ansible's role twice against a booted Debian 12, over ssh: the second run changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from testing.report import ROOT, Check
from validation.packages.systems import DEBIAN_12, BootedSystem, bootstrap

PLAYBOOK = ROOT / "deploy/ansible/site.yml"
RECAP = re.compile(r"ok=\d+ +changed=(\d+) +unreachable=0 +failed=0")


def check(package: Path, scratch: Path) -> list[Check]:
    """Return what ansible-lint says of the role, and what two runs of it change."""
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "ANSIBLE_HOST_KEY_CHECKING": "False"}
    lint = subprocess.run(
        [programs / "ansible-lint", "--offline", "--quiet", "."],
        cwd=PLAYBOOK.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    bootstrap(DEBIAN_12)
    with BootedSystem(DEBIAN_12, [], scratch / "ansible.log") as node:
        key = scratch / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        node.do(
            f"mkdir -p /root/.ssh; echo '{key.with_suffix('.pub').read_text().strip()}' > /root/.ssh/authorized_keys"
        )
        inventory = scratch / "inventory.ini"
        inventory.write_text(f"[gpu_nodes]\n{node.ADDRESS} ansible_user=root ansible_ssh_private_key_file={key}\n")
        files = {name: str(ROOT / "deploy/node/rankscope.conf") for name in ("unused",)}
        variables = {
            "rankscope_package": str(package),
            "rankscope_options": "--simulate=2",
            "rankscope_web_files": files,
        }
        command = [programs / "ansible-playbook", "-i", inventory, PLAYBOOK, "-e", json.dumps(variables)]
        runs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=False) for _ in range(2)]
        changed = [int(found[1]) if (found := RECAP.search(run.stdout)) else -1 for run in runs]
        active = node.run("systemctl is-active rankscope-exporter run-rankscope.mount").stdout.split()
    failed = "".join(run.stdout + run.stderr for run in runs)[-300:] if -1 in changed else ""
    return [
        Check("ansible-lint has nothing to say", lint.returncode == 0, lint.stdout.strip()[-300:] or "nothing"),
        Check("the role starts the service", active == ["active"] * 2, failed or f"{changed[0]} changes"),
        Check("a second run changes nothing", changed[1] == 0, f"{changed[1]} changes"),
    ]
