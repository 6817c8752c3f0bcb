"""Golden files: `/metrics` of a simulated node with every collector, and a rank's record, compared byte by byte.

Of the same page in the OpenMetrics format, and of a node with a split GPU, only the difference is described.

Both are interfaces for dashboards, rules and other programs. Run this test with `RANKSCOPE_GOLDEN=1` to rewrite the
golden files, and review the difference.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric
from testing.clock import Clock
from testing.simulated_job import Job, SimulatedRank, lagging
from testing.sysfs import interface, port
from tests.exporter.conftest import START

import rankscope_exporter.gpu.collectors.exporter as exporter_collector
from rankscope.record import layout
from rankscope.record.reader import read_rank
from rankscope_exporter import registry
from rankscope_exporter.dcgm.collector import Averages, DcgmCollector
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.gpu.allocation.claims import Claims
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames
from rankscope_exporter.gpu.collectors import allocation
from rankscope_exporter.gpu.device_sampler import DeviceSampler, Timing
from rankscope_exporter.gpu.states import GpuStates
from rankscope_exporter.ranks.diagnosis_service import FindingFlags
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.simulation import simulated_uuid

HERE = Path(__file__).parent / "golden"
UUIDS = [simulated_uuid(index) for index in range(2)]
SCENARIO = """
gpus: 2
timeline:
  0: [{at: 0, busy: 0.8, memory_used: 60 GiB, temperature: 71, processes: [{pid: 101, memory: 59 GiB}]},
      {at: 10, busy: 0.6, throttle: [sw_power_cap, sw_thermal_slowdown]}]
  1: [{at: 0, busy: 0.5}, {at: 12, lost: true}]
"""
SPLIT = (
    "{gpus: 1, model: {like: A100, mig: [1g.5gb, 2g.10gb]}, timeline: {0: [{at: 0, busy: 0.4, memory_used: 8 GiB}]}}"
)
SECONDS = 20
PID, WORKER, OWNER = 101, 102, 1000
JOB = Holder("slurm", slurm_job_id="7", user="alice")


def compare(name: str, found: bytes) -> None:
    path = HERE / name
    if os.environ.get("RANKSCOPE_GOLDEN"):
        path.write_bytes(found)
    # Compared by line first, for a readable difference.
    assert found.splitlines() == path.read_bytes().splitlines()
    assert found == path.read_bytes()


class Node:
    """A node with GPUs read by samplers, and ranks. All clocks are the test's."""

    def __init__(self, machine: Any, run_dir: Path, procfs: Path) -> None:
        self.clock: Clock = machine.clock
        claims = Claims({UUIDS[1]: [JOB]}, True)
        users = UserNames(lambda _: "alice")
        with_claims = allocation.watching(lambda: claims, ProcessTable(procfs, sees_all=True), users)
        collectors = [with_claims if one is allocation.COLLECTOR else one for one in registry.GPU_COLLECTORS]
        self.averages = Averages(collectors)
        self.gpus = GpuStates(self.averages.collectors, oldest=lambda: self.clock() - 5)
        timing = Timing(unix=self.clock, monotonic=self.clock)
        assert machine.driver.connect()
        count = machine.driver.device_count()
        self._samplers = [DeviceSampler(n, machine.driver.device, self.gpus.state_of, timing) for n in range(count)]
        self._uuids = UUIDS[:count]
        self._run_directory = RunDirectory([run_dir], clock=self.clock)
        sysfs = procfs.parent / "sys"
        port(sysfs, "mlx5_0", data=1_000, errors={"symbol_error": 2})
        interface(sysfs, "eth0", rx_dropped=3, tx_dropped=1)
        settings: Any = SimpleNamespace(
            node="node-a", collectors=registry.HELP, procfs=procfs, sysfs=sysfs, **vars(FindingFlags())
        )
        self._ranks, _ = registry.rank_collectors(settings, lambda _at: {})
        self._users = users

    def sample(self, seconds: int) -> None:
        for second in range(seconds):
            self.clock.advance(1)
            for sampler in self._samplers:
                sampler.round()
            if second == 0:
                for uuid in self._uuids:
                    self.gpus.record_xid(uuid, None, self.clock())
            self._users.resolve()
        self.gpus.record_xid(self._uuids[-1], 79, self.clock())

    def scan(self) -> Scan:
        """Return the ranks as alive. This process has written all records, and its own locks do not count."""
        found = self._run_directory.scan(with_steps=True)
        ranks = [
            replace(
                rank,
                owner=OWNER,
                user="alice",
                snapshot=replace(rank.snapshot, alive=True, read_monotonic=1060.0, lock_pid=PID),
            )
            for rank in sorted(found.ranks, key=lambda rank: rank.key)  # independent of the file system's order
        ]
        return replace(found, ranks=ranks)

    def collectors(self, metrics: Callable[[Any], Iterable[Metric]]) -> list[Any]:
        """Return all collectors. `metrics` returns the metrics of a rank collector."""
        state = {"nvml_up": True, "gpus_seen": 1, "gpus_expected": 2, "is_released": False}
        now = self.gpus.latest()
        sampler: Any = SimpleNamespace(texts=now.texts, values=now.values, xids=self.gpus.xids, **state)
        ranks = [SimpleNamespace(name=one.name, collect=lambda one=one: metrics(one)) for one in self._ranks]
        own = registry.collectors(registry.HELP, self.averages.collectors, sampler, ranks)
        assert [one.name for one in own] == [*registry.HELP]
        return [*own, DcgmCollector(self.averages, sampler)]


def write_processes(procfs: Path) -> None:
    """Write the files that are read of a rank's process and its loader worker."""
    for pid, name in ((PID, "python"), (WORKER, "pt_data_worker")):
        process = procfs / str(pid)
        (process / f"task/{pid}").mkdir(parents=True)
        (process / f"task/{pid}/children").write_text(f"{WORKER} " if pid == PID else "")
        fields = ["S", "1", *["0"] * 9, "1200", "300", "40", "10", *["0"] * 6, "250000", "0"]
        (process / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}")
        (process / "schedstat").write_text("15000000000 2500000000 900")
        (process / "io").write_text("rchar: 1\nread_bytes: 4096000\n")
        (process / "status").write_text(
            f"Name:\t{name}\nState:\tS (sleeping)\nUid:\t{OWNER}\t{OWNER}\t{OWNER}\t{OWNER}\n"
        )
        (process / "cgroup").write_text("0::/user.slice\n")
        (process / "comm").write_text(f"{name}\n")


def train(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return two ranks after forty steps, one of them a straggler."""
    monkeypatch.setattr("time.time", lambda: START - 60)
    labels: dict[str, object] = {"world_size": "2", "rankscope_version": "0.1.0", "torch_version": "2.4.1"}
    labels |= {"backend": "gloo", "phases": ["tokenize"], "group": "0-1", "pid": str(PID), "probes_disabled": []}
    job = Job(directory, ranks=0)
    job.ranks = [SimulatedRank(directory, rank, 1000.0, uuid=UUIDS[rank], **labels) for rank in range(2)]
    job.run(40, lagging("data_wait", laggard=1))
    return job


@pytest.fixture
def page(machine, run_dir, tmp_path, monkeypatch) -> Callable[..., bytes]:
    """Return a function that returns the node's page with GPUs of a scenario, in a format."""

    def rendered(scenario: str, accept: str = "text/plain") -> bytes:
        write_processes(tmp_path)
        train(run_dir, monkeypatch)
        monkeypatch.setattr("time.time", lambda: START)
        monkeypatch.setattr(platform, "python_version", lambda: "3.11.7")
        monkeypatch.setattr(exporter_collector, "__version__", "0.1.0")
        node = Node(machine(scenario), run_dir, tmp_path)
        node.sample(SECONDS)
        scan = node.scan()
        scrape = Scrape(node.collectors(lambda collector: collector.poll(scan)), clock=lambda: 0.0)
        body, _ = scrape.render(accept, "")
        succeeded = [line for line in body.splitlines() if line.startswith(b"rankscope_exporter_collector_success{")]
        assert len(succeeded) == len(registry.COLLECTORS) + 1
        assert all(line.endswith(b" 1.0") for line in succeeded)
        return body

    return rendered


def test_a_nodes_metrics_are_unchanged(page) -> None:
    compare("metrics.txt", page(SCENARIO))


def test_a_node_with_a_split_gpu_has_other_lines(page) -> None:
    lines = (text.decode().splitlines(keepends=True) for text in ((HERE / "metrics.txt").read_bytes(), page(SPLIT)))
    _, _, *changed = difflib.unified_diff(*lines, n=0)
    compare("mig.diff", "".join(line for line in changed if not line.startswith("@@")).encode())


def test_openmetrics_has_the_same_lines_without_the_suffix_of_a_counters_name(page) -> None:
    text = (HERE / "metrics.txt").read_bytes()
    body = re.sub(rb"^(# TYPE .*)(?<!_total) counter$", rb"\1 unknown", text, flags=re.M)
    body = re.sub(rb"^(# HELP \S+)_total (.*\n# TYPE \S+)_total counter$", rb"\1 \2 counter", body, flags=re.M)
    found = page(SCENARIO, "application/openmetrics-text;version=1.0.0")
    assert found.splitlines() == [*body.splitlines(), b"# EOF"]
    assert found.endswith(b"# EOF\n")


@pytest.mark.skipif(sys.byteorder != "little", reason="records use the machine's byte order")
def test_a_ranks_record_is_unchanged(run_dir, monkeypatch) -> None:
    monkeypatch.setattr("time.time", lambda: START - 60)
    job = train(run_dir, monkeypatch)
    path = job.ranks[1].writer.path
    assert path is not None
    compare("rank.record", path.read_bytes())
    assert len(path.read_bytes()) == layout.SIZE
    assert read_rank(path).info["phases"] == ["tokenize"]


def test_slot_indices_are_unchanged() -> None:
    lines = [f"{index:4d} {field} {layout.FIELDS[field]}\n" for field, index in layout.INDEX.items()]
    offsets = {name: value for name, value in vars(layout).items() if name.endswith("_OFFSET")}
    lines += [f"{name} {value}\n" for name, value in sorted(offsets.items())]
    compare("record.txt", "".join(lines).encode())
