"""One job on two nodes with an exporter each, and an analyzer that asks both: it names the slow rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from examples.demo.job import Job
from testing import servers
from testing.exporter_process import exporter, metrics
from testing.stack import wait_for

RUN = "two-nodes"


def test_the_analyzer_names_the_slow_rank_of_a_run_on_two_nodes(tmp_path: Path) -> None:
    run_dirs = [tmp_path / "node-0", tmp_path / "node-1"]
    for run_dir in run_dirs:
        run_dir.mkdir()
    # Both nodes' jobs read their faults from the same directory; only the records are separate.
    jobs = [Job(tmp_path, RUN, run_dir, ranks=2, first_rank=2 * node) for node, run_dir in enumerate(run_dirs)]
    port = servers.free_port()
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                exporter(servers.free_port(), f"--run-dir={path}", f"--node={path.name}", "--simulate=4")
            )
            for path in run_dirs
        ]
        analyzer = stack.enter_context(exporter(servers.free_port(), f"--analyze={','.join(nodes)}"))

        def shown(name: str, *labels: str) -> list[str]:
            lines = (line for line in metrics(analyzer) if line.startswith(f"{name}{{"))
            return [line for line in lines if all(label in line for label in labels)]

        for node, job in enumerate(jobs):
            stack.callback(job.kill)
            job.start("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
        assert wait_for(lambda: shown("rankscope_run_judged_info", f'run="{RUN}"'), 120), jobs[0].output.read_text()
        time.sleep(15)
        assert not shown("rankscope_finding_ratio", f'run="{RUN}"')
        jobs[0].begin_extra_work()
        slow = 'kind="straggler"', 'cause="other"', 'rank="0"', 'group="0-3"'
        onset = time.monotonic()
        assert wait_for(lambda: shown("rankscope_finding_ratio", *slow), 60), metrics(analyzer)
        print(f"seconds until the finding: {time.monotonic() - onset:.1f}")
        assert shown("rankscope_analyzer_run_ranks", f'run="{RUN}"')[0].endswith(" 4.0")
        for node in nodes:
            assert not [line for line in metrics(node) if line.startswith("rankscope_run_judged_info{")]
