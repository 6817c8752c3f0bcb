"""Attack: a record that names a GPU that another user's process uses, to show the attacker's run on it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.exporter_process import eventually, exporter, metrics
from tests.attacks.ranks.ranks_support import as_user, living
from tests.attacks.users import MALLORY, VICTIM, needs_root

from rankscope_exporter.simulation import simulated_uuid

pytestmark = needs_root
UUID = simulated_uuid(0)
ELSEWHERE = simulated_uuid(1)


@contextmanager
def working(uid: int) -> Iterator[int]:
    """Yield the pid of a process of the user."""
    with subprocess.Popen([*as_user(uid), "sleep", "600"]) as process:
        try:
            eventually(lambda: f"Uid:\t{uid}" in Path(f"/proc/{process.pid}/status").read_text())
            yield process.pid
        finally:
            process.kill()


@contextmanager
def node(run_dir: Path, port: int, *pids: int) -> Iterator[str]:
    """Yield the URL of an exporter whose GPU 0 has these processes; GPU 1 has none."""
    listed = ", ".join(f"{{pid: {pid}}}" for pid in pids)
    scenario = run_dir / "scenario.yml"
    scenario.write_text(f"gpus: 2\ntimeline:\n  0: [{{at: 0, processes: [{listed}]}}]\n  1: [{{at: 0}}]\n")
    with exporter(port, f"--run-dir={run_dir}", f"--simulate={scenario}") as url:
        eventually(lambda: any(line.startswith("rankscope_gpu_state_info") for line in metrics(url)))
        yield url


def gpu_of(url: str, run: str) -> str | None:
    """Return the UUID of the GPU of a run's rank; None if there is no such run."""
    lines = [line for line in metrics(url) if line.startswith("rankscope_rank_info{")]
    found = [re.search(r'uuid="([^"]*)"', line) for line in lines if f'run="{run}"' in line]
    return found[0][1] if found and found[0] else None


def held_by(url: str, label: str) -> str:
    """Return a label of GPU 0's holder."""
    (line,) = (one for one in metrics(url) if one.startswith("rankscope_gpu_allocation_info{") and 'gpu="0"' in one)
    found = re.search(rf'\b{label}="([^"]*)"', line)
    return found[1] if found else ""


def test_a_record_cannot_name_a_gpu_that_only_other_users_processes_use(run_dir: Path, free_port: int) -> None:
    with (
        working(VICTIM) as pid,
        living(run_dir, MALLORY, "forged", run="forged", uuid=UUID),
        node(run_dir, free_port, pid) as url,
    ):
        eventually(lambda: gpu_of(url, "forged") == "")
        eventually(lambda: held_by(url, "run") == "")
        assert "rankscope_exporter_rank_gpus_contradicted 1.0" in metrics(url)


def test_a_record_cannot_name_a_gpu_of_another_node(run_dir: Path, free_port: int) -> None:
    there = simulated_uuid(0, machine=1)
    with living(run_dir, MALLORY, "forged", run="forged", uuid=there), node(run_dir, free_port) as url:
        eventually(lambda: gpu_of(url, "forged") == "")
        assert not any(there in line for line in metrics(url))
        assert "rankscope_exporter_rank_gpus_contradicted 1.0" in metrics(url)


def test_a_record_cannot_name_a_gpu_on_a_node_without_gpus(run_dir: Path, free_port: int) -> None:
    with (
        living(run_dir, MALLORY, "forged", run="forged", uuid=UUID),
        exporter(free_port, f"--run-dir={run_dir}") as url,
    ):
        eventually(lambda: gpu_of(url, "forged") == "")


def test_a_record_cannot_name_another_users_gpu_after_its_end(run_dir: Path, free_port: int) -> None:
    with working(VICTIM) as pid, node(run_dir, free_port, pid) as url:
        with living(run_dir, MALLORY, "forged", run="forged", uuid=UUID) as forged:
            eventually(lambda: gpu_of(url, "forged") == "")
            forged.end()
        eventually(lambda: any(line.startswith("rankscope_rank_exit_info{") for line in metrics(url)))
        assert gpu_of(url, "forged") == ""


def test_a_record_can_name_a_gpu_that_its_owner_shares_with_others(run_dir: Path, free_port: int) -> None:
    with (
        working(VICTIM) as pid,
        working(MALLORY) as another,
        living(run_dir, VICTIM, "mine", run="mine", uuid=UUID),
        node(run_dir, free_port, pid, another) as url,
    ):
        eventually(lambda: gpu_of(url, "mine") == UUID)
        eventually(lambda: held_by(url, "run") == "mine")


def test_a_record_can_name_a_free_gpu_that_its_process_does_not_use_yet(run_dir: Path, free_port: int) -> None:
    with (
        working(VICTIM) as pid,
        living(run_dir, VICTIM, "mine", run="mine", uuid=ELSEWHERE),
        node(run_dir, free_port, pid) as url,
    ):
        eventually(lambda: gpu_of(url, "mine") == ELSEWHERE)
