"""Resources of the ranks' processes: CPU time, storage and run queue, and values that stay unknown."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from testing.programs import Program, python, running
from testing.records import living_rank, rank_snapshot
from testing.waiting import eventually

from rankscope.record.stopped import CGROUPS, is_frozen
from rankscope_exporter.exposition.sample_cache import SampleCache
from rankscope_exporter.ranks import process_usage
from rankscope_exporter.ranks.collectors.rank_processes import METRICS, RankProcess, RankProcesses
from rankscope_exporter.ranks.metric import RANK_LABELS
from rankscope_exporter.ranks.process_usage import Usage, read_usage
from rankscope_exporter.ranks.rank import Key, Rank, Scan
from rankscope_exporter.ranks.run_directory import RunDirectory

RANK = """
import os, sys, time
from pathlib import Path
from testing.records import publish
writer, _ = publish(Path(sys.argv[1]), "r.3", rank="3")

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

def fork(seconds, stay=True):
    child = os.fork()
    if child == 0:
        burn(seconds)
        if stay:
            sys.stdin.read()
        os._exit(0)
    return child

"""
CLOCK_TICK = 0.01


@contextmanager
def rank(run_dir: Path, code: str) -> Iterator[Program]:
    """Start a rank that first runs the code."""
    with running(*python(RANK + code + "\nprint('ready', flush=True)\nsys.stdin.read()\n", run_dir)) as process:
        yield process


class Watching:
    """The collector of the ranks in a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_directory = RunDirectory([run_dir])
        self._source = RankProcesses()

    def collect(self) -> list[Metric]:
        return self._source.poll(self._run_directory.scan())


def values(collector: Watching) -> dict[str, float]:
    """Return the values by name and the additional label."""
    found = {}
    for family in collector.collect():
        for sample in family.samples:
            assert (sample.labels["run"], sample.labels["rank"]) == ("r", "3")
            more = [value for label, value in sample.labels.items() if label not in RANK_LABELS]
            found[" ".join([sample.name.removeprefix("rankscope_rank_"), *more])] = sample.value
    return found


def test_cpu_time_of_the_rank_and_its_workers_is_separate(run_dir: Path) -> None:
    # On one CPU the two wait for each other.
    with rank(run_dir, "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); fork(0.5); burn(0.2)"):
        collector = Watching(run_dir)
        found = values(collector)
        while values(collector)["cpu_seconds_total workers"] < 0.5 - CLOCK_TICK:
            assert values(collector)["child_processes"] == 1
        assert found["cpu_seconds_total training"] >= 0.2 - CLOCK_TICK
        assert found["resident_memory_bytes"] > 2**20
        assert found["run_queue_seconds_total"] > 0


def test_the_time_of_workers_that_have_ended_still_counts(run_dir: Path) -> None:
    with rank(run_dir, "os.waitpid(fork(0.3, stay=False), 0)"):
        found = values(Watching(run_dir))
    assert found["child_processes"] == 0
    assert found["cpu_seconds_total workers"] >= 0.3 - CLOCK_TICK


def test_bytes_that_workers_read_are_added_to_the_ranks(run_dir: Path, tmp_path: Path) -> None:
    for process, children in (("7", "8 9"), ("8", ""), ("9", "")):
        fake(tmp_path, process, children, read_bytes=1000)
    assert read_usage(7, tmp_path).read_bytes == 3000


def test_before_the_first_step_the_children_of_workers_count_as_well(run_dir: Path, tmp_path: Path) -> None:
    """A build tool runs compilers, for example."""
    for process, children in (("7", "8"), ("8", "9 11"), ("9", "10"), ("10", "")):  # 11 has ended
        fake(tmp_path, process, children, read_bytes=1000)
    usage = read_usage(7, tmp_path, generations=4)
    assert (usage.children, usage.children_cpu, usage.read_bytes) == (1, 0.5 + 3 * 2.5, 4000)
    assert read_usage(7, tmp_path).children_cpu == 0.5 + 2.5
    many = read_usage(7, tmp_path, children_limit=2, generations=4)
    assert (many.children_cpu, many.read_bytes, many.children, many.descendants) == (None, None, 1, 3)


def test_a_poll_does_not_change_what_other_threads_read(living: Living, tmp_path: Path) -> None:
    living.add(7)
    living.values("cpu_seconds_total")
    ((key, process),) = living.found.items()
    before = process.cpu["training"]
    stat = tmp_path / "7/stat"
    stat.write_text(stat.read_text().replace(" 150 50 ", " 151 50 "))
    living.values("cpu_seconds_total")
    assert process.cpu["training"] == before < living.found[key].cpu["training"]


@pytest.mark.parametrize(("steps", "cpu"), [(0.0, 5.5), (1.0, 3.0)])
def test_children_of_children_are_read_only_before_the_first_step(living: Living, tmp_path: Path, steps, cpu) -> None:
    living.add(7, children=[8], each="9", steps=steps)
    fake(tmp_path, "9")
    assert living.values("cpu_seconds_total")["7 workers"] == cpu


def test_a_rank_that_has_ended_is_absent(run_dir: Path) -> None:
    with rank(run_dir, ""):
        pass
    assert values(Watching(run_dir)) == {}


def fake(procfs: Path, pid: str, children: str = "", read_bytes: int = 0, name: str = "python") -> Path:
    """Create a process in the test's own procfs, with a main thread and another thread."""
    directory = procfs / pid
    for thread in (pid, f"{pid}1"):
        (directory / "task" / thread).mkdir(parents=True)
        (directory / "task" / thread / "stat").write_text("")
        (directory / "task" / thread / "children").write_text(children if thread == pid else "")
    (directory / "schedstat").write_text("500 2000000000 3\n")
    after_name = ["S", *["0"] * 10, "150", "50", "30", "20", *["0"] * 6, "256", *["0"] * 20]
    (directory / "stat").write_text(f"{pid} ({name}) {' '.join(after_name)}\n")
    (directory / "io").write_text(f"rchar: 5\nwchar: 6\nread_bytes: {read_bytes}\nwrite_bytes: 9\n")
    return directory


def test_a_process_name_may_contain_parentheses_and_fields(tmp_path: Path) -> None:
    fake(tmp_path, "7", name="a) R 9 9 9 (b")
    usage = read_usage(7, tmp_path)
    assert (usage.cpu, usage.children_cpu, usage.resident) == (2.0, 0.5, 256 * 4096)
    assert usage.run_queue == 2.0


@pytest.mark.parametrize("pid", ["7", "8"])
def test_bytes_read_are_unknown_without_permission(tmp_path: Path, pid: str) -> None:
    fake(tmp_path, "7", "8")
    fake(tmp_path, "8")
    (tmp_path / pid / "io").unlink()
    (tmp_path / pid / "io").mkdir()  # reading it fails for root as well
    assert read_usage(7, tmp_path).read_bytes is None


def test_a_worker_that_ends_during_a_reading_makes_nothing_unknown(tmp_path: Path) -> None:
    fake(tmp_path, "7", "8 9", read_bytes=10)
    fake(tmp_path, "9", read_bytes=10)
    usage = read_usage(7, tmp_path)
    assert usage.read_bytes == 20
    assert usage.children_cpu == 0.5 + 2.5


def test_a_kernel_that_does_not_list_children_leaves_workers_unknown(tmp_path: Path) -> None:
    for path in (fake(tmp_path, "7") / "task").glob("*/children"):
        path.unlink()
    usage = read_usage(7, tmp_path)
    assert usage.children is None
    assert usage.children_cpu is None


def test_a_kernel_that_does_not_count_waiting_leaves_it_unknown(tmp_path: Path) -> None:
    (fake(tmp_path, "7") / "schedstat").write_text("0 0 0\n")
    assert read_usage(7, tmp_path).run_queue is None


def test_a_process_that_is_gone_is_an_error(tmp_path: Path) -> None:
    directory = fake(tmp_path, "7")
    shutil.rmtree(directory)
    with pytest.raises(OSError, match="stat"):
        read_usage(7, tmp_path)


def usage(children: float | None = 1.0, read: float | None = 1.0, waits: Mapping[int, float] | None = None) -> Usage:
    return Usage(1.0, children, 0.5, waits or {}, read, 0, 1.0)


def test_counters_never_decrease() -> None:
    process = RankProcess(SampleCache(METRICS, ("r", "0")))
    process.update(usage(children=5.0, read=100.0))
    process.update(usage(children=4.0, read=90.0))
    assert process.cpu == {"training": 1.0, "workers": 5.0}
    assert process.read_bytes == 100.0


def test_waits_of_ended_workers_still_count() -> None:
    process = RankProcess(SampleCache(METRICS, ("r", "0")))
    process.update(usage())
    assert process.workers_run_queue is None
    for waits in ({8: 1.0}, {8: 1.5, 9: 0.25}, {9: 0.5}, {}, {8: 0.125}):
        process.update(usage(waits=waits))
    assert process.workers_run_queue == 1.0 + 0.75 + 0.25 + 0.125


def test_waits_for_a_cpu_are_counted_per_worker(tmp_path: Path) -> None:
    fake(tmp_path, "7", "8 9")
    fake(tmp_path, "8")
    (fake(tmp_path, "9") / "schedstat").write_text("0 0 0\n")
    assert read_usage(7, tmp_path).children_run_queue == {8: 2.0}


def test_unknown_children_add_no_worker_series() -> None:
    process = RankProcess(SampleCache(METRICS, ("r", "0")))
    process.update(usage(children=None, read=None))
    assert process.cpu == {"training": 1.0}
    assert process.read_bytes is None


def test_an_interrupted_reading_counts_no_wait_twice() -> None:
    process = RankProcess(SampleCache(METRICS, ("r", "0")))
    for reading in (usage(waits={8: 2.0}), None, usage(waits={8: 2.5}), many(), usage(waits={8: 3.0})):
        process.update(reading)
    assert process.workers_run_queue == 3.0


def many() -> Usage:
    """Return the usage of a process with too many children to read."""
    return Usage(1.0, None, 0.5, {}, None, 1500, 1.0, unread_children=1500)


class Living:
    """Ranks whose processes are in the test's own procfs. It counts the files that are read."""

    def __init__(self, procfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._procfs = procfs
        self._processes = RankProcesses(procfs)
        self._ranks: list[Rank] = []
        self.read: list[str] = []
        for name in ("_read", "_read_all"):
            monkeypatch.setattr(process_usage, name, self._counting(getattr(process_usage, name)))

    def _counting(self, read: Callable[[str], bytes]) -> Callable[[str], bytes]:
        return lambda path: self.read.append(path) or read(path)

    def add(
        self,
        pid: int,
        owner: int = 1,
        records: int = 1,
        children: Iterable[int] = (),
        each: str = "",
        steps: float = 1.0,
    ) -> None:
        """Add a process that holds records, its children, and each child's own children."""
        fake(self._procfs, str(pid), " ".join(map(str, children)))
        for child in children:
            fake(self._procfs, str(child), each)
        for number in range(records):
            snapshot = replace(
                rank_snapshot({"steps": steps}, run=f"{pid}-{number}"), lock_pid=pid, path=Path(f"{pid}-{number}")
            )
            self._ranks.append(Rank(snapshot, None, owner))

    def end(self, pid: int) -> None:
        shutil.rmtree(self._procfs / str(pid))

    @property
    def found(self) -> Mapping[Key, RankProcess]:
        return self._processes.found

    def values(self, metric: str) -> dict[str, float]:
        """Return a metric's values of all ranks, by pid and the additional label."""
        found = {}
        self.read.clear()
        for family in self._processes.poll(Scan(self._ranks, Counter())):
            for sample in family.samples:
                if sample.name == f"rankscope_rank_{metric}":
                    found[" ".join([sample.labels["run"].split("-")[0], *sample.labels.get("who", "").split()])] = (
                        sample.value
                    )
        return found


@pytest.fixture
def living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Living:
    return Living(tmp_path, monkeypatch)


HONEST = range(100, 108)  # pids of one user's ranks, with 16 workers each


def add_honest(living: Living) -> None:
    for pid in HONEST:
        living.add(pid, owner=2, children=range(pid * 100, pid * 100 + 16))


def are_honest_read(living: Living) -> bool:
    """Return whether all values of the honest ranks are known."""
    unread, cpu = living.values("child_processes_unread"), living.values("cpu_seconds_total")
    return not any(str(pid) in unread or cpu[f"{pid} workers"] < 16 for pid in HONEST)


def test_a_process_is_read_once_even_if_it_holds_several_records(living: Living) -> None:
    living.add(7, records=128, children=[8, 9])
    assert living.values("child_processes") == {"7": 2}
    assert len(living.read) == len(set(living.read))


def test_with_too_many_children_values_that_include_them_are_absent(living: Living) -> None:
    living.add(7, records=128, children=range(1000, 2500))
    add_honest(living)
    for _ in range(30):
        assert are_honest_read(living)
        assert living.values("child_processes_unread") == {"7": 1500}
        assert len(living.read) < 1000
    assert living.values("child_processes") | {"7": 1500} == living.values("child_processes")
    assert "7 workers" not in living.values("cpu_seconds_total")
    assert living.values("cpu_seconds_total")["7 training"] == 2.0
    for metric in ("workers_run_queue_seconds_total", "read_bytes_total"):
        assert "7" not in living.values(metric)


def test_children_of_many_processes_have_a_common_limit(living: Living) -> None:
    for pid in range(200, 328):
        living.add(pid, children=range(pid * 1000, pid * 1000 + 30))
    add_honest(living)
    assert are_honest_read(living)
    assert len(living.values("child_processes_unread")) == 128 - 1024 // 30
    assert len(living.read) < 3 * 1024 + 4 * (128 + 8 * 17)


def test_all_owners_have_the_same_share_of_children(living: Living) -> None:
    for owner in range(1010, 1025):
        living.add(owner, owner=owner, children=range(owner * 1000, owner * 1000 + 200))
    add_honest(living)
    assert are_honest_read(living)
    assert living.values("child_processes_unread") == {str(owner): 200 for owner in range(1010, 1025)}


def test_children_of_children_are_not_read(living: Living) -> None:
    living.add(7, children=[8], each="9")
    assert living.values("child_processes") == {"7": 1}
    assert not [path for path in living.read if "/9/" in path]


def test_absent_values_return_after_the_excess_children_have_ended(living: Living, tmp_path: Path) -> None:
    living.add(7, children=[8])
    assert living.values("workers_run_queue_seconds_total") == {"7": 2.0}
    children = tmp_path / "7" / "task" / "7" / "children"
    children.write_text(" ".join(map(str, range(1000, 2500))))
    assert living.values("workers_run_queue_seconds_total") == {}
    children.write_text("8")
    assert living.values("workers_run_queue_seconds_total") == {"7": 2.0}
    assert living.values("child_processes_unread") == {}


def test_a_list_of_children_is_read_to_its_end(run_dir: Path) -> None:
    """The kernel returns one page at a time, which is 512 pids of seven digits."""
    with rank(run_dir, "children = [fork(0) for _ in range(1100)]") as process:
        assert read_usage(process.pid, children_limit=0).children == 1100


def test_the_pid_in_a_record_is_not_used(run_dir: Path) -> None:
    with living_rank(run_dir, "r.3", rank="3", pid="1") as process:
        (found,) = RunDirectory([run_dir]).scan().ranks
    assert found.snapshot.lock_pid == process.pid


class Stopping:
    """The collector of one rank without progress since `stalled` seconds, and whether it shows the rank as stopped."""

    def __init__(self, run_dir: Path, process: Program, stalled: float = 60.0) -> None:
        self.pid = process.pid
        self._source = RankProcesses()
        self._directory = RunDirectory([run_dir])
        self._stalled = stalled

    def is_stopped(self) -> bool:
        (one,) = self._directory.scan().ranks
        snapshot = replace(one.snapshot, read_monotonic=one.snapshot.last_progress + self._stalled)
        self._source.poll(Scan((replace(one, snapshot=snapshot),), Counter()))
        (process,) = self._source.found.values()
        return process.is_stopped


def test_a_rank_that_a_signal_has_stopped_is_stopped_until_it_is_continued(run_dir: Path) -> None:
    with living_rank(run_dir, slots={"started_monotonic": time.monotonic()}) as process:
        watching = Stopping(run_dir, process)
        assert not watching.is_stopped()
        os.kill(process.pid, signal.SIGSTOP)
        eventually(watching.is_stopped)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: not watching.is_stopped())


def test_a_rank_that_has_just_made_progress_is_not_stopped_yet(run_dir: Path) -> None:
    """A debugger or a profiler stops a process for a moment."""
    with living_rank(run_dir, slots={"started_monotonic": time.monotonic()}) as process:
        os.kill(process.pid, signal.SIGSTOP)
        eventually(Stopping(run_dir, process).is_stopped)
        assert not Stopping(run_dir, process, stalled=1.0).is_stopped()


FREEZERS = {
    "version 2": ("0::/job\n", "job/cgroup.events", "populated 1\nfrozen 1\n", "populated 1\nfrozen 0\n"),
    "both versions": (
        "4:memory:/x\n0::/job\n",
        "unified/job/cgroup.events",
        "populated 1\nfrozen 1\n",
        "populated 1\nfrozen 0\n",
    ),
    "version 1": ("5:devices,freezer:/a:b\n0::/x\n", "freezer/a:b/freezer.state", "FROZEN\n", "THAWED\n"),
    "while it freezes": ("5:freezer:/job\n", "freezer/job/freezer.state", "FROZEN\n", "FREEZING\n"),
}


@pytest.mark.parametrize("name", FREEZERS)
def test_a_process_of_a_frozen_cgroup_is_stopped(tmp_path: Path, name: str) -> None:
    cgroup, file, frozen, thawed = FREEZERS[name]
    state, procfs = tmp_path / "cgroup" / file, tmp_path / "proc"
    state.parent.mkdir(parents=True)
    (procfs / "7").mkdir(parents=True)
    (procfs / "7/cgroup").write_text(cgroup)
    for text, expected in ((frozen, True), (thawed, False)):
        state.write_text(text)
        assert is_frozen(7, procfs, tmp_path / "cgroup") is expected
    state.unlink()
    assert not is_frozen(7, procfs, tmp_path / "cgroup"), "no such cgroup here"


@pytest.mark.parametrize("text", ["", "no colons", "0::/../../elsewhere\n", "\0:\0:\0"])
def test_a_process_whose_cgroup_is_unknown_is_not_frozen(tmp_path: Path, text: str) -> None:
    assert not is_frozen(7, tmp_path, tmp_path)
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text(text)
    assert not is_frozen(7, tmp_path, tmp_path)


REAL = {
    "version 2": (CGROUPS / "cgroup.controllers", "cgroup.freeze", "1", "0"),
    "both versions": (CGROUPS / "unified/cgroup.controllers", "cgroup.freeze", "1", "0"),
    "version 1": (CGROUPS / "freezer/cgroup.procs", "freezer.state", "FROZEN", "THAWED"),
}


@pytest.mark.parametrize("name", REAL)
def test_a_rank_in_a_frozen_cgroup_is_stopped_until_it_is_thawed(run_dir: Path, name: str) -> None:
    root, file, freeze, thaw = REAL[name]
    if os.geteuid() != 0 or not root.exists() or not os.access(root.parent, os.W_OK):
        pytest.skip("did not run: needs root and this version of cgroups")
    cgroup = root.parent / f"rankscope-test-{os.getpid()}"
    with living_rank(run_dir, slots={"started_monotonic": time.monotonic()}) as process:
        cgroup.mkdir()
        try:
            (cgroup / "cgroup.procs").write_text(str(process.pid))
            watching = Stopping(run_dir, process)
            assert not watching.is_stopped()
            (cgroup / file).write_text(freeze)
            eventually(watching.is_stopped)
            (cgroup / file).write_text(thaw)
            eventually(lambda: not watching.is_stopped())
        finally:
            (cgroup / file).write_text(thaw)
            process.end()
            cgroup.rmdir()
