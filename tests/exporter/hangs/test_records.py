"""`rankscope hang --run NAME`: the rank that blocks a run on this machine, from the ranks' records."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from testing.records import living_rank, publish
from testing.waiting import eventually

from rankscope.record import layout
from rankscope.record.clock import boot_id
from rankscope.record.stopped import is_stopped
from rankscope_exporter.hangs import records
from rankscope_exporter.hangs.command import show
from rankscope_exporter.hangs.records import describe_dumps

IN_ALL_REDUCE = layout.OPS.index("all_reduce") + 1.0
GROUPS = ["0-2", "0-1"]


@contextmanager
def ranks(
    directory: Path,
    *slots: Mapping[str, float],
    run: str = "r",
    groups: Sequence[str] = GROUPS,
    first: int = 0,
    **labels: str,
) -> Iterator[list[int]]:
    """Start ranks whose records have these slots, the first with the number `first`. Yield their process IDs."""
    with ExitStack() as living:
        started = [
            living_rank(directory, f"{run}.{rank}", own, run=run, rank=str(rank), groups=groups, **labels)
            for rank, own in enumerate(slots, first)
        ]
        yield [living.enter_context(one).pid for one in started]


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return a function that returns the lines about a run of such ranks."""

    def said(*slots: Mapping[str, float], **how: Any) -> list[str]:
        with ranks(tmp_path, *slots, **how):
            assert show(None, "r", [tmp_path]) == 0
        return capsys.readouterr().out.splitlines()

    return said


def waiting(group: int, *issued: float) -> Mapping[str, float]:
    return {"collective_op": IN_ALL_REDUCE, "collective_group": group, **counted(*issued)}


def counted(*issued: float) -> Mapping[str, float]:
    return {"group_collectives": issued[0]} if issued else {}


@pytest.mark.parametrize(("issued", "lacks"), [(4.0, "1 collective fewer"), (2.0, "3 collectives fewer")])
def test_a_rank_that_has_not_reached_a_collective_is_named(said, issued, lacks) -> None:
    line, why, *_ = said(waiting(0, 5.0), waiting(0, 5.0), counted(issued))
    assert line == "Rank 2 of 3 blocks the other ranks."
    assert why.startswith(f"Rank 2 waits in no operation: it has issued {lacks} than the others. ")
    assert "Rank 0 waits in all_reduce 5 of group 0-2 (ranks 0-2); in total 2 ranks wait for it" in why


@pytest.mark.parametrize(("issued", "line"), [(4.0, "Rank 2 of 3 blocks"), (5.0, "No rank is late: 2 of 3")])
def test_a_group_whose_name_was_cut_off_has_the_ranks_that_use_it(said, issued, line) -> None:
    found = "\n".join(said(waiting(0, 5.0), waiting(0, 5.0), counted(issued), groups=["0,1,2,7,9…ab12cd34"]))
    assert found.startswith(line)
    assert "all_reduce 5 of group 0,1,2,7,9…ab12cd34 (ranks 0-2)" in found


IN_RECV = {"collective_op": layout.OPS.index("recv") + 1.0, "collective_group": 0.0, "group_collectives": 5.0}


def test_a_stage_that_is_in_no_operation_is_named_if_the_others_receive(said) -> None:
    """Sends and receives are not counted: all ranks have issued as many collectives."""
    line, why, *_ = said(IN_RECV, counted(5.0), IN_RECV)
    assert line == "Rank 1 of 3 blocks the other ranks."
    assert why == (
        "Rank 1 waits in no operation: it has not issued the next one. "
        "Rank 0 waits in a recv of group 0-2 (ranks 0-2); in total 2 ranks wait for it, directly or through others."
    )


def outside(phase: str, issued: float) -> Mapping[str, float]:
    """Return a rank whose host is in no collective, as with CUDA."""
    return {"phase": layout.PHASES.index(phase), "group_collectives": issued}


@pytest.mark.parametrize("phase", ["data_wait", "other", "device_wait", "forward"])
@pytest.mark.parametrize("of_others", ["device_wait", "other", "forward"])
def test_a_rank_that_has_issued_fewer_collectives_is_named_although_no_host_is_in_one(said, phase, of_others) -> None:
    """The device waits with CUDA and NCCL. `forward` may wait for it as well, at a place that no probe knows."""
    line, why, *_ = said(outside(of_others, 5.0), outside(phase, 3.0), outside(of_others, 5.0))
    assert line == "Rank 1 of 3 blocks the other ranks."
    assert "it has issued 2 collectives fewer than the others. Rank 0 waits in collective 5 of group 0-2" in why


def test_if_all_ranks_have_issued_as_many_and_none_is_in_a_collective_no_rank_is_blamed(said) -> None:
    line, phases, *_ = said(outside("device_wait", 5.0), outside("data_wait", 5.0), outside("device_wait", 5.0))
    assert line == "No hang in a collective: none of the 3 ranks waits in an operation."
    assert phases == "Phases: rank 1 in data_wait; ranks 0,2 in device_wait."


@pytest.mark.parametrize("stopped", [[1], [0, 1], []])
def test_stopped_ranks_are_named(tmp_path, capsys, stopped) -> None:
    with ranks(tmp_path, waiting(0, 5.0), counted(4.0), waiting(0, 5.0)) as pids:
        for rank in stopped:
            os.kill(pids[rank], signal.SIGSTOP)
            eventually(lambda rank=rank: is_stopped(pids[rank]))
        assert show(None, "r", [tmp_path]) == 0
    line, _, *others = capsys.readouterr().out.splitlines()
    assert line == "Rank 1 of 3 blocks the other ranks."
    named = {1: "Rank 1 is", 2: "Ranks 0-1 are"}.get(len(stopped), "")
    assert [one for one in others if "stopped" in one] == [
        f"{named} stopped: by a signal (SIGSTOP), a debugger or a frozen cgroup."
    ] * bool(stopped)


@pytest.mark.usefixtures("old_boot")
@pytest.mark.parametrize(("limit", "is_said"), [(7200.0, True), (1800.0, False)])
def test_the_output_says_if_the_run_has_just_made_progress(tmp_path, capsys, monkeypatch, limit, is_said) -> None:
    monkeypatch.setattr(records, "HANGS_AFTER", limit)
    began = {"started_monotonic": time.monotonic() - 3600.0}
    with ranks(tmp_path, outside("other", 5.0) | began, outside("other", 4.0) | began, outside("other", 5.0) | began):
        assert show(None, "r", [tmp_path]) == 0
    assert ("may not hang" in capsys.readouterr().out) is is_said


def test_if_all_stages_send_or_receive_no_rank_is_blamed(said) -> None:
    assert said(IN_RECV, IN_RECV, IN_RECV)[0].startswith("No rank is late: 3 of 3 ranks wait")


def test_ranks_in_different_operations_are_listed_and_no_network_is_blamed(said) -> None:
    barrier = waiting(0, 5.0) | {"collective_op": layout.OPS.index("barrier") + 1}
    line, *others = said(waiting(0, 5.0), waiting(0, 5.0), barrier)
    assert line == (
        "Ranks call different operations for collective 5 of group 0-2 (ranks 0-2): Ranks 0-1: all_reduce, "
        "Rank 2: barrier."
    )
    assert "network" not in "".join(others)


def test_without_a_living_rank_it_says_how_the_ranks_of_the_run_have_ended(tmp_path, capsys) -> None:
    for rank, ended in enumerate((layout.RUNNING, layout.EXCEPTION, layout.EXCEPTION)):
        publish(tmp_path, f"r.{rank}", {"ended": ended}, rank=str(rank))
    assert show(None, "r", [tmp_path]) == 2
    assert capsys.readouterr().err.endswith("; ended: rank 0 (killed), ranks 1-2 (exception)\n")


def test_the_run_has_to_be_named_if_there_are_several(tmp_path, capsys) -> None:
    with ranks(tmp_path, counted(1.0), run="a"), ranks(tmp_path, counted(1.0), run="b"):
        assert show(None, None, [tmp_path]) == 2
        assert "several runs found; choose one with --run: a, b" in capsys.readouterr().err
        assert show(None, "c", [tmp_path]) == 2
        assert "no living rank of run c" in capsys.readouterr().err
        assert show(None, "b", [tmp_path]) == 0


WORLD = {"groups": ["0-3"], "world_size": "4", "backend": "gloo"}
ELSEWHERE = "Ranks 2-3 of 4 are not visible here: they run on another node or have ended. "
ADVICE = "Run this command on each node of the run."


def test_ranks_on_another_node_are_not_visible_and_not_blamed(said) -> None:
    assert said(waiting(0, 5.0), waiting(0, 5.0), **WORLD) == [
        "The ranks here wait for ranks that are not visible here.",
        f"{ELSEWHERE}Rank 0 waits in all_reduce 5 of group 0-3 (ranks 0-3); "
        f"in total 2 ranks wait for them, directly or through others. {ADVICE}",
        "Phases: ranks 0-1 in other.",
    ]


def test_a_rank_that_blocks_is_named_on_its_node_alone(said) -> None:
    line, why, unseen = said(waiting(0, 5.0), counted(4.0), **WORLD)
    assert line == "Rank 1 of 4 blocks the other ranks."
    assert why.startswith("Rank 1 waits in no operation: it has issued 1 collective fewer than the others. ")
    assert unseen == f"{ELSEWHERE}{ADVICE}"


def test_a_rank_whose_device_may_wait_for_another_node_is_named_with_that_doubt(said) -> None:
    late, early = outside("device_wait", 4.0), outside("device_wait", 5.0)
    line, _, _, doubt, *_ = said(early, late, **{**WORLD, "backend": "nccl"})
    assert line == "Rank 1 of 4 blocks the other ranks."
    assert doubt == "On the device, rank 1 may wait for a rank that is not visible here."


def test_with_ranks_elsewhere_it_does_not_say_that_no_collective_hangs(said) -> None:
    in_device_wait = outside("device_wait", 5.0)
    line, unseen, phases, *_ = said(in_device_wait, in_device_wait, **{**WORLD, "backend": "nccl"})
    assert line == "None of the 2 ranks here waits in an operation."
    assert unseen == f"{ELSEWHERE}{ADVICE}"
    assert phases == "Phases: ranks 0-1 in device_wait."


def test_a_group_that_is_whole_here_is_judged_although_the_run_is_not(said) -> None:
    line, _, likely, unseen, _ = said(waiting(0, 5.0), waiting(0, 5.0), **{**WORLD, "groups": ["0-1"]})
    assert line == "No rank here is late: 2 of 2 ranks wait in operations that all others have issued."
    assert likely.startswith("Likely a network fault")
    assert unseen == f"{ELSEWHERE}{ADVICE}"


def publish_ended(directory: Path, began: float, boot: str) -> None:
    """Write the record of rank 2 of three ranks, which was killed after it began."""
    labels = {"rank": "2", "groups": ["0-2"], "world_size": "3", "boot_id": boot}
    publish(directory, "r.2", {"started_monotonic": began, **counted(4.0)}, **labels)


def test_a_rank_that_has_ended_here_is_blamed_with_its_end(tmp_path, said) -> None:
    now = time.monotonic()
    publish_ended(tmp_path, now, boot_id())
    began = {"started_monotonic": now}
    line, why, *_ = said(waiting(0, 5.0) | began, waiting(0, 5.0) | began, world_size="3")
    assert line == "Rank 2 of 3 blocks the other ranks."
    assert why.startswith("Rank 2 has ended (killed). Rank 0 waits in all_reduce 5 of group 0-2 (ranks 0-2); in total")


@pytest.mark.parametrize(("seconds_before", "boot"), [(1.0, boot_id()), (-1.0, "another")])
def test_a_rank_that_ended_before_the_living_ones_began_may_now_be_elsewhere(
    tmp_path, said, seconds_before, boot
) -> None:
    now = time.monotonic()
    publish_ended(tmp_path, now - seconds_before, boot)
    began = {"started_monotonic": now}
    line, unseen, *_ = said(waiting(0, 5.0) | began, waiting(0, 5.0) | began, world_size="3")
    assert line == "The ranks here wait for a rank that is not visible here."
    assert unseen.startswith("Rank 2 of 3 is not visible here: it runs on another node or has ended. ")


@pytest.mark.parametrize("size", ["9999999999", "many"])
def test_a_forged_world_size_costs_nothing(said, size) -> None:
    assert said(waiting(0, 5.0), counted(4.0), waiting(0, 5.0), world_size=size)[0].startswith(
        "Rank 1 of 3 blocks the other ranks."
    )


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (
            {"TORCH_FR_DUMP_TEMP_FILE": "/fr/rank_"},
            "/fr/rank_RANK when NCCL's watchdog times out. Then run: rankscope hang /fr/rank_",
        ),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/fr/x", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, "/fr/xRANK on request"),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/fr/x", "TORCH_NCCL_DUMP_ON_TIMEOUT": "False"}, "/fr/xRANK on request"),
        ({"TORCH_FR_DUMP_TEMP_FILE": "fr/rank_"}, "/job/fr/rank_RANK when NCCL's watchdog times out."),
        ({"TORCH_FR_DUMP_TEMP_FILE": "fr/"}, "Then run: rankscope hang /job/fr/"),
        ({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/p/"}, "echo 1 > /p/RANK.pipe"),
        ({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "p"}, "echo 1 > /job/pRANK.pipe"),
        ({}, "set TORCH_FR_DUMP_TEMP_FILE before the next start"),
        ({"HOME": "/home/u"}, "/home/u/.cache/torch/comm_lib_trace_rank_RANK when NCCL's watchdog times out"),
        ({"HOME": "/home/u", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "before torch 2.7, to /tmp/nccl_trace_rank_RANK"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/c"}, "rankscope hang /c/torch/comm_lib_trace_rank_"),
    ],
)
def test_the_output_names_the_place_of_torchs_dumps(environment, text) -> None:
    assert text in " ".join(describe_dumps(environment, Path("/job")))


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_without_a_buffer_torch_writes_no_dumps(name) -> None:
    [line] = describe_dumps({"TORCH_FR_DUMP_TEMP_FILE": "/fr/rank_", name: "0"})
    assert line.startswith("torch writes no flight recorder dumps")
