"""`rankscope hang --run NAME`: who holds up a run of this machine, by the ranks' records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from testing.records import living_rank

from rankscope.record import layout
from rankscope_exporter.hangs.command import show
from rankscope_exporter.hangs.records import in_words

IN_ALL_REDUCE = layout.OPS.index("all_reduce") + 1.0
GROUPS = ["0-2", "0-1"]


@contextmanager
def ranks(directory: Path, *slots: Mapping[str, float], run: str = "r") -> Iterator[None]:
    """Start ranks whose records say this."""
    with ExitStack() as living:
        for rank, own in enumerate(slots):
            labels = {"run": run, "rank": str(rank), "groups": GROUPS}
            living.enter_context(living_rank(directory, f"{run}.{rank}", own, **labels))
        yield


def waiting(group: int, *issued: float) -> Mapping[str, float]:
    return {"collective_op": IN_ALL_REDUCE, "collective_group": group, **counted(*issued)}


def counted(*issued: float) -> Mapping[str, float]:
    return {"group_collectives": issued[0]} if issued else {}


def test_a_rank_that_has_not_come_to_a_collective_is_named(tmp_path, capsys) -> None:
    with ranks(tmp_path, waiting(0, 5.0), waiting(0, 5.0), counted(4.0)):
        assert show(None, "r", [tmp_path]) == 0
    line, why, *_ = capsys.readouterr().out.splitlines()
    assert line == "Rank 2 of 3 holds up the others."
    assert why.startswith("Rank 2 is in no operation")
    assert "Rank 0 waits in all_reduce 5 of group 0-2 (ranks 0-2); 2 ranks wait for it" in why


def test_the_run_has_to_be_named_where_there_are_several(tmp_path, capsys) -> None:
    with ranks(tmp_path, counted(1.0), run="a"), ranks(tmp_path, counted(1.0), run="b"):
        assert show(None, None, [tmp_path]) == 2
        assert "several runs, choose with --run: a, b" in capsys.readouterr().err
        assert show(None, "c", [tmp_path]) == 2
        assert "no living rank of run c" in capsys.readouterr().err
        assert show(None, "b", [tmp_path]) == 0


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"TORCH_FR_DUMP_TEMP_FILE": "/fr/rank_"},
            "/fr/rank_RANK when NCCL's watchdog ends it; then: rankscope hang /fr/rank_",
        ),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/fr/x", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, "/fr/xRANK when asked"),
        ({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/p/"}, "echo 1 > /p/RANK.pipe"),
        ({}, "set TORCH_FR_DUMP_TEMP_FILE for the next start"),
    ],
)
def test_it_says_where_torch_will_leave_its_dumps(environment, said) -> None:
    assert said in " ".join(in_words(environment))
