"""`rankscope stacks --all-nodes` asks the exporters of two nodes, one of them with a password."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import bcrypt
from testing.exporter_process import exporter_process
from testing.programs import python, running
from testing.servers import free_port
from tests.trainer_hooks.scripts import WITHOUT_TORCH, watched

WAIT = """
writer.write_info({**info, "world_size": "4", "node": sys.argv[1]})
def wait_for_others():
    print("ready", flush=True)
    sys.stdin.read()
def load_shard():
    print("ready", flush=True)
    sys.stdin.read()
(load_shard if rank == "2" else wait_for_others)()
"""


def test_the_rank_that_differs_is_found_among_the_ranks_of_both_nodes(tmp_path: Path) -> None:
    web_config, ports = tmp_path / "web.yml", [free_port(), free_port()]
    web_config.write_text("{}")
    with ExitStack() as stack:
        for node, more in ((0, ()), (1, (f"--web.config.file={web_config}",))):
            run_dir = tmp_path / f"node-{node}"
            run_dir.mkdir()
            for rank in (2 * node, 2 * node + 1):
                variables = watched(RANK=str(rank), RANKSCOPE_RUN_DIR=str(run_dir))
                stack.enter_context(running(*python(WITHOUT_TORCH + WAIT, run_dir.name), env=variables))
            flags = ("--simulate=1", "--web.enable-stacks", f"--run-dir={run_dir}", *more)
            stack.enter_context(exporter_process(ports[node], *flags))
        web_config.write_text(f"basic_auth_users:\n  ops: {bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode()}\n")
        urls = [f"http://127.0.0.1:{ports[0]}", f"http://ops:secret@127.0.0.1:{ports[1]}"]
        command = [sys.executable, "-m", "rankscope.cli.launch", "stacks", "--all-nodes", "--run=job", "--url", *urls]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        without = subprocess.run(
            [*command[:-1], urls[1].replace("ops:secret@", "")], capture_output=True, text=True, check=False, timeout=60
        )
    assert answer.returncode == 0, answer.stderr
    sentence, counted, *_ = answer.stdout.splitlines()
    assert sentence.startswith("Rank 2 (node-1) stands in <string>:")
    assert "in load_shard; 3 others stand in <string>:" in sentence
    assert counted == "=== run job: 4 ranks on 2 nodes"
    assert without.returncode == 1
    assert "answers 401" in without.stderr
    assert "=== run job: 2 of 4 ranks" in without.stdout
