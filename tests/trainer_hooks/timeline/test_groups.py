"""Groups of ranks: the records of a hang, and groups without names, indices or torch's numbers."""

from __future__ import annotations

import gc
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testing import programs
from testing.leaving import leave
from testing.torchrun import environment, forked
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankscope.record import layout
from rankscope.record.layout import OPS
from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import is_label
from rankscope.record.writer import RankWriter
from rankscope.timeline.groups import UNCOUNTED, Groups, bus_factors
from rankscope.timeline.timeline import Timeline

JOB = Path(__file__).parents[1] / "jobs" / "standing_still.py"
DEADLINE = 60.0  # seconds


def hang(kind: str, run_dir: Path) -> dict[str, RankSnapshot]:
    """Start a hanging job and return the records of its ranks once they stand still."""
    variables = environment(RANKSCOPE_RUN_DIR=str(run_dir), RANKSCOPE_RUN="hang")
    with programs.start(*forked(3, JOB, kind), env=variables, stderr=subprocess.DEVNULL) as job:
        try:
            return standing_still([Path(json.loads(job.read_line())) for _ in range(3)])
        finally:
            job.terminate()  # torchrun then ends the ranks


def standing_still(paths: list[Path]) -> dict[str, RankSnapshot]:
    """Return the ranks' records once none has had an event for a second."""
    before = time.monotonic() + DEADLINE
    while time.monotonic() < before:
        ranks = [read_rank(path) for path in paths]
        if all(rank.read_monotonic - rank.last_progress > 1.0 for rank in ranks):
            return {rank.info["rank"]: rank for rank in ranks}
        time.sleep(0.1)
    raise AssertionError("the job never stood still")


def opened(rank: RankSnapshot) -> tuple[str, str] | None:
    """Return the open operation and its group in a record."""
    op = int(rank["collective_op"])
    return (OPS[op - 1], rank.groups[int(rank["collective_group"])]) if op else None


def number(rank: RankSnapshot, group: str) -> float:
    return rank.many("group_collectives")[rank.groups.index(group)]


@pytest.mark.parametrize(("kind", "op"), [("all_reduce", "all_reduce"), ("ddp", "ddp_all_reduce")])
def test_a_rank_that_misses_a_collective_of_all_ranks_is_behind_by_one(run_dir: Path, kind: str, op: str) -> None:
    ranks = hang(kind, run_dir)
    assert {name: opened(rank) for name, rank in ranks.items()} == {"0": (op, "0-2"), "1": (op, "0-2"), "2": None}
    assert ranks["0"].phase == ranks["1"].phase == "collective_wait"
    assert number(ranks["0"], "0-2") == number(ranks["1"], "0-2") == number(ranks["2"], "0-2") + 1


def test_a_rank_that_misses_a_collective_of_two_ranks_is_behind_only_in_their_group(run_dir: Path) -> None:
    ranks = hang("pair", run_dir)
    assert {name: opened(rank) for name, rank in ranks.items()} == {"0": None, "1": ("all_gather", "1-2"), "2": None}
    assert number(ranks["1"], "1-2") == number(ranks["2"], "1-2") + 1
    assert len({number(rank, "0-2") for rank in ranks.values()}) == 1


class UncountedProcessGroup:
    """A backend whose collectives torch does not count, like MPI."""

    def size(self) -> int:
        return 2

    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("ProcessGroup mpi does not yet support sequence numbers.")


class CountedProcessGroup:
    def __init__(self) -> None:
        self.number = 0
        self.is_shut_down = False

    def size(self) -> int:
        return 2

    def _get_sequence_number_for_group(self) -> int:
        if self.is_shut_down:
            raise RuntimeError("ProcessGroup was shut down")
        return self.number


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Make groups of a process whose process groups have the names that the tests set."""
    monkeypatch.setattr("rankscope.process.identity.is_distributed", lambda: True)
    monkeypatch.setattr("rankscope.process.identity.group_name", lambda group=None: getattr(group, "called", "0-3"))
    return Groups(RankWriter())


def numbers(groups: Groups) -> list[float]:
    start = layout.INDEX["group_collectives"]
    return groups._writer.slots[start : start + layout.MAX_GROUPS].tolist()


def test_a_backend_that_does_not_count_is_counted_here(groups: Groups) -> None:
    process_group = UncountedProcessGroup()
    group = groups.count_next(process_group)
    assert groups.catch_up(process_group) is group
    groups.skip(group, process_group)
    assert groups.count_issued(process_group) is group
    assert numbers(groups)[0] == 2


def test_collectives_of_cpp_code_are_counted_by_torch(groups: Groups) -> None:
    process_group = CountedProcessGroup()
    process_group.number = 5
    groups.count_issued(process_group)
    assert numbers(groups)[0] == 5


def test_collectives_of_cpp_code_between_watched_ones_are_counted_at_the_step(groups: Groups) -> None:
    process_group = CountedProcessGroup()
    for _ in range(2):
        groups.count_next(process_group)
    assert numbers(groups)[0] == 2
    process_group.number = 5
    assert groups.unread
    groups.read_numbers()
    assert numbers(groups)[0] == 5
    assert not groups.unread


def test_a_number_never_decreases_if_the_backend_counts_less(groups: Groups) -> None:
    process_group = CountedProcessGroup()
    for _ in range(3):
        groups.count_next(process_group)
    process_group.number = 1  # as if it counted three as one
    groups.read_numbers()
    assert numbers(groups)[0] == 3
    process_group.number = 2
    groups.count_issued(process_group)
    assert numbers(groups)[0] == 4


def test_the_numbers_of_idle_groups_are_not_read(groups: Groups) -> None:
    quiet, busy = CountedProcessGroup(), CountedProcessGroup()
    for process_group in (quiet, busy):
        groups.find(process_group)
    groups.count_next(busy)
    quiet.number = busy.number = 7
    groups.read_numbers()
    assert groups.find(quiet).last == 0
    assert groups.find(busy).last == 7


def test_a_process_group_that_was_shut_down_is_counted_here(groups: Groups) -> None:
    process_group = CountedProcessGroup()
    groups.count_next(process_group)
    process_group.is_shut_down = True
    groups.read_numbers()
    groups.count_next(process_group)
    groups.read_numbers()
    assert numbers(groups)[0] == 2


def test_a_second_process_group_of_the_same_ranks_adds_to_their_number(groups: Groups) -> None:
    for _ in range(2):
        process_group = CountedProcessGroup()
        process_group.number = 3
        groups.count_issued(process_group)
    assert groups.names == ["0-3"]
    assert numbers(groups)[0] == 6


def test_a_process_group_is_not_kept_alive(groups: Groups) -> None:
    process_group = CountedProcessGroup()
    groups.find(process_group)
    del process_group
    gc.collect()
    assert groups._known == {}


def test_excess_groups_are_not_counted_and_logged_once(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    alive = []
    for index in range(layout.MAX_GROUPS + 5):
        process_group = CountedProcessGroup()
        process_group.called = str(index)  # read by the fixture's names
        process_group.number = 1
        groups.count_issued(process_group)
        alive.append(process_group)
    assert len(groups.names) == layout.MAX_GROUPS
    assert groups.find(alive[-1]).index == UNCOUNTED
    assert numbers(groups) == [0.0] + [1.0] * (layout.MAX_GROUPS - 1)
    assert groups._writer.slots[layout.INDEX["group_wait_seconds"]] == 0
    assert len(caplog.records) == 1


def test_a_process_group_with_unknown_ranks_is_not_counted_by_group(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(group: object = None) -> str:
        if group is None:
            return "0-3"
        raise KeyError(group)

    monkeypatch.setattr("rankscope.process.identity.group_name", unknown)
    assert groups.find(CountedProcessGroup()).index == UNCOUNTED
    assert groups.names == ["0-3"]


def test_names_of_scattered_ranks_are_short_and_unique(groups: Groups) -> None:
    alive = []
    for last in (901, 902):
        process_group = CountedProcessGroup()
        process_group.called = ",".join(map(str, [*range(0, 900, 7), last]))
        groups.find(process_group)
        alive.append(process_group)
    assert len(set(groups.names)) == 3
    assert all(len(name) < 140 for name in groups.names)


def test_bus_bytes_follow_the_factors_of_nccl_tests() -> None:
    factors = dict(zip(OPS, bus_factors(8), strict=True))
    assert factors["all_reduce"] == factors["ddp_all_reduce"] == 2 * 7 / 8
    assert factors["reduce_scatter"] == factors["all_to_all"] == 7 / 8
    assert factors["all_gather"] == 7  # 7/8 of a result eight times the payload
    assert factors["broadcast"] == factors["reduce"] == factors["send"] == 1
    assert set(bus_factors(1)) <= {0.0, 1.0}


class Described(UncountedProcessGroup):
    def __init__(self, called: str, group_desc: str) -> None:
        self.called, self.group_desc = called, group_desc


def test_a_group_has_the_scripts_description(groups: Groups) -> None:
    whole, first = Described("0-3", "default_pg"), Described("0-1", "mesh_pp")
    described, unnamed = Described("0-3", "mesh_dp"), Described("2-3", "undefined")
    for group in (whole, first, described, unnamed):
        groups.count_next(group)
    assert groups.names == ["0-3", "0-1", "2-3"]
    assert groups.descriptions == ["mesh_dp", "mesh_pp", ""]


def test_a_group_has_the_descriptions_of_all_process_groups_of_its_ranks(groups: Groups) -> None:
    """Megatron's embedding group has the ranks of its pipeline group if there are two stages, and is used first."""
    for description in ("default_pg", "EMBEDDING_GROUP", "PIPELINE_GROUP", "undefined", "EMBEDDING_GROUP"):
        groups.count_next(Described("0-3", description))
    assert groups.descriptions == ["EMBEDDING_GROUP,PIPELINE_GROUP"]
    for number in range(10):
        groups.count_next(Described("0-3", f"{number}" * 30))
    [description] = groups.descriptions
    assert description.startswith("EMBEDDING_GROUP,PIPELINE_GROUP,000")
    assert is_label(description)


def test_a_long_or_missing_description_is_accepted(groups: Groups) -> None:
    groups.count_next(Described("0-1", "x\n" * 100))
    groups.count_next(UncountedProcessGroup())
    assert groups.descriptions == ["", ("x?" * 100)[:48]]


@pytest.fixture
def one_of_four(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[Timeline]:
    """Make this process rank 0 of four; the others do not exist."""
    monkeypatch.setenv("RANKSCOPE_RUN", "alone")  # there is no other rank to agree with on a name
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield timeline
    leave()


@pytest.mark.parametrize(
    ("ranks", "names", "described"),
    [
        ([0, 1, 2, 3], ("pp",), {"0-3": "mesh_pp"}),
        ([0, 1, 2, 3], None, {"0-3": ""}),
        ([[0, 1], [2, 3]], ("dp", "tp"), {"0-3": "", "0,2": "mesh_dp", "0-1": "mesh_tp"}),
        ([0, 1], ("tp",), {"0-3": "", "0-1": "mesh_tp"}),
    ],
)
def test_a_mesh_with_one_dimension_describes_the_group_of_all_ranks(
    one_of_four: Timeline, ranks: list[Any], names: tuple[str, ...] | None, described: dict[str, str]
) -> None:
    """Torch uses the default group for it, and does not describe that."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    for group in (dist.group.WORLD, *mesh.get_all_groups()):
        dist.all_reduce(torch.ones(1), group=group)
    groups = one_of_four.groups
    assert dict(zip(groups.names, groups.descriptions, strict=True)) == described


def test_a_group_that_torch_does_not_describe_is_described_by_the_frameworks_variable(
    groups: Groups, load: Callable[..., object]
) -> None:
    whole = Described("0-3", "default_pg")
    stages, tensor, data, own = (Described(name, "undefined") for name in ("0,2", "0-1", "1,3", "2-3"))
    described, experts = Described("1-2", "mesh_tp"), Described("0,3", "undefined")
    load(
        "megatron.core.parallel_state",
        _PIPELINE_MODEL_PARALLEL_GROUP=[stages],
        _TENSOR_MODEL_PARALLEL_GROUP=tensor,
        _DATA_PARALLEL_GROUP_WITH_CP=data,
        _MODEL_PARALLEL_GROUP=described,
    )
    load("deepspeed.utils.groups", _EXPERT_PARALLEL_GROUP={"ep_size_2": experts}, mpu=None)
    for group in (whole, stages, tensor, data, own, described, experts):
        groups.count_next(group)
    assert dict(zip(groups.names, groups.descriptions, strict=True)) == {
        "0-3": "",
        "0,2": "PIPELINE_MODEL_PARALLEL_GROUP",
        "0-1": "TENSOR_MODEL_PARALLEL_GROUP",
        "1,3": "DATA_PARALLEL_GROUP_WITH_CP",
        "2-3": "",
        "1-2": "mesh_tp",
        "0,3": "EXPERT_PARALLEL_GROUP",
    }


@pytest.mark.parametrize(("attribute", "description"), [("pp_proc_group", "pipe"), ("dp_proc_group", "data")])
def test_the_groups_of_deepspeeds_grid_are_described_by_its_axes(
    groups: Groups, load: Callable[..., object], attribute: str, description: str
) -> None:
    """A pipeline over all ranks: DeepSpeed sends in the default group, and has another group of the same ranks."""
    other = Described("0-3", "undefined")
    load("deepspeed.utils.groups", mpu=SimpleNamespace(**{attribute: other}))
    groups.count_next(Described("0-3", "default_pg"))
    groups.count_next(other)
    assert groups.descriptions == [description]


def test_a_group_whose_description_raises_is_counted(groups: Groups) -> None:
    class Silent(UncountedProcessGroup):
        @property
        def group_desc(self) -> str:
            raise RuntimeError("no backend")

    groups.count_next(Silent())
    assert groups.descriptions == [""]


def test_groups_whose_ranks_send_to_each_other_are_noted_once(groups: Groups) -> None:
    announced = []
    groups.on_new = lambda: announced.append([*groups.pairwise])
    whole, pair = Described("0-3", ""), Described("0-1", "")
    groups.count_next(whole)
    groups.count_next(pair)
    assert groups.pairwise == []
    for _ in range(3):
        groups.catch_up(pair)
    assert groups.pairwise == ["1"]
    assert announced[-1] == ["1"]
    assert len(announced) == 3
