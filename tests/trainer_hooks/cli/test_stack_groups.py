"""Ranks with the same stacks are one group, by texts of py-spy or faulthandler. A sentence names the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from rankscope.cli.stack_groups import FRAMES_SHOWN, StackGroup, describe_difference, group_stacks
from rankscope.cli.stack_text import LINE_LIMIT, THREADS_LIMIT, read_threads

SITE = "/opt/venv/lib/python3.12/site-packages"
STANDARD = "/usr/lib/python3.12"
LAUNCH = (("<module>", "/home/u/job/train.py", 80), ("_run_code", "<frozen runpy>", 88))
WAIT = (
    ("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 2806),
    ("wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 83),
    ("step", "/home/u/job/train.py", 61),
    *LAUNCH,
)
FILTER = (("filter", "/home/u/job/data/dataset.py", 31), ("step", "/home/u/job/train.py", 55), *LAUNCH)
LOADER = (
    ("select", f"{STANDARD}/selectors.py", 415),
    ("get", f"{STANDARD}/multiprocessing/queues.py", 113),
    ("_try_get_data", f"{SITE}/torch/utils/data/dataloader.py", 1314),
    ("step", "/home/u/job/train.py", 55),
    *LAUNCH,
)
BACKWARD = (
    ("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 979),
    ("watched", f"{SITE}/rankscope/probes/span.py", 103),
    ("backward", f"{SITE}/torch/_tensor.py", 623),
    ("step", "/home/u/job/train.py", 60),
    *LAUNCH,
)
STARTED = (("run", f"{STANDARD}/threading.py", 1012), ("_bootstrap", f"{STANDARD}/threading.py", 1032))
PIN = (
    ("poll", f"{STANDARD}/multiprocessing/connection.py", 257),
    ("_pin_memory_loop", f"{SITE}/torch/utils/data/_utils/pin_memory.py", 52),
    *STARTED,
)
SAVE = (("write", "/home/u/job/save.py", 12), *STARTED)
HOOK_IN_BACKWARD = (("on_gradient", "/home/u/job/train.py", 9), ("apply", f"{SITE}/torch/autograd/function.py", 307))

Calls = tuple[tuple[str, str, int], ...]


def by_faulthandler(main: Calls, *others: Calls, address: int = 0x7F4A4F3FF6C0) -> str:
    """Return a text as CPython 3.10 to 3.13 writes it: without names, the main thread last."""
    threads = [f"Thread 0x{address + place:016x}" for place in range(len(others))] + [
        f"Current thread 0x{address:016x}"
    ]
    return "\n\n".join(
        f"{thread} (most recent call first):\n"
        + "\n".join(f'  File "{file}", line {line} in {function}' for function, file, line in calls)
        for thread, calls in zip(threads, (*others, main), strict=True)
    )


def by_named_faulthandler(main: Calls, *others: Calls, address: int = 0x7F4A4F3FF6C0) -> str:
    """Return a text as CPython 3.14 writes it."""
    text = by_faulthandler(main, *others, address=address)
    return text.replace(" (most", " [worker] (most", len(others)).replace("c0 (most", "c0 [MainThread] (most")


def by_py_spy(main: Calls, *others: Calls, address: int = 1000) -> str:
    """Return a text as py-spy writes it: the main thread first, files without the folders of their packages."""

    def called(calls: Calls) -> str:
        return "".join(f"    {function} ({_short(file)}:{line})\n" for function, file, line in calls)

    named = "".join(f'Thread {address + 1 + n} (idle): "Thread-{n}"\n{called(one)}' for n, one in enumerate(others))
    trampoline = "    <interpreter trampoline> (<shim>:1)\n"
    return (
        f"Process {address}: python train.py --token secret\nPython v3.12.1 (/usr/bin/python3.12)\n\n"
        f'Thread {address} (active+gil): "MainThread"\n{called(main)}{trampoline}{named}'
    )


def _short(file: str) -> str:
    for folder in (f"{SITE}/", f"{STANDARD}/", "/home/u/job/"):
        file = file.removeprefix(folder)
    return file


FORMATS = (by_faulthandler, by_named_faulthandler, by_py_spy)


def sentence(texts: Mapping[int, str], absent: Mapping[int, str] | None = None, **operations: str) -> str:
    by_rank = {int(rank.removeprefix("rank")): name for rank, name in operations.items()}
    return describe_difference(group_stacks(texts, absent, by_rank))


@pytest.mark.parametrize("write", FORMATS)
def test_the_rank_that_differs_is_named_first(write: Callable[..., str]) -> None:
    texts = {rank: write(WAIT, PIN, address=rank * 0x1000 + 0xC0) for rank in range(8)}
    texts[3] = write(FILTER, PIN, address=0x9990C0)
    first, others = groups = group_stacks(texts)
    assert (first.title, others.title) == ("Rank 3", "Ranks 0-2,4-7 (7 ranks)")
    assert describe_difference(groups) == (
        "Rank 3 stands in dataset.py:31 in filter; "
        "7 others wait in all_reduce (distributed_c10d.py:2806), called from train.py:61 in step."
    )


def test_ranks_of_which_py_spy_and_the_hook_wrote_the_texts_are_one_group() -> None:
    texts = {rank: write(BACKWARD, PIN) for rank, write in enumerate(FORMATS)}
    [group] = group_stacks(texts)
    assert group.ranks == [0, 1, 2]


def test_the_order_of_threads_and_the_idle_ones_do_not_count() -> None:
    feed = (
        ("wait", f"{STANDARD}/threading.py", 327),
        ("_feed", f"{STANDARD}/multiprocessing/queues.py", 231),
        *STARTED,
    )
    texts = {
        0: by_faulthandler(WAIT, SAVE, PIN, feed),
        1: by_faulthandler(WAIT, feed, SAVE),
        2: by_faulthandler(WAIT, PIN, SAVE),
    }
    [group] = group_stacks(texts)
    assert [line for line in group.lines if "thread" in line and "threading" not in line] == [
        "  thread write:",
        "  idle threads: _feed, _pin_memory_loop",
    ]


def test_code_that_torch_numbers_is_the_same_on_all_ranks() -> None:
    texts = {number: by_faulthandler((("forward", f"<eval_with_key>.{number}", 12), *LAUNCH)) for number in range(12)}
    [group] = group_stacks(texts)
    assert group.place == "in <eval_with_key>:12 in forward"


def test_addresses_in_names_do_not_count() -> None:
    names = {rank: f"<lambda at 0x7f{rank:02x}>" for rank in range(3)}
    texts = {rank: by_py_spy(((name, "/home/u/job/train.py", 9), *LAUNCH)) for rank, name in names.items()}
    assert [group.ranks for group in group_stacks(texts)] == [[0, 1, 2]]


def test_the_state_of_a_process_follows_its_place() -> None:
    groups = group_stacks({rank: by_py_spy(WAIT) for rank in range(3)}, states={1: "stopped by a signal (state T)"})
    first, others = describe_difference(groups).split("; ")
    assert first.startswith("Rank 1 waits in all_reduce (distributed_c10d.py:2806)")
    assert first.endswith(", stopped by a signal (state T)")
    assert "stopped" not in others


def test_where_the_standard_library_waits_does_not_count() -> None:
    other = (("wait", f"{STANDARD}/threading.py", 327), *LOADER[2:])
    assert sentence({0: by_faulthandler(LOADER), 1: by_faulthandler(other)}) == (
        "Both ranks stand in dataloader.py:1314 in _try_get_data, called from train.py:55 in step."
    )


def test_the_collective_of_the_record_is_named_where_the_stack_shows_none() -> None:
    texts = {0: by_faulthandler(BACKWARD), 1: by_faulthandler(BACKWARD), 2: by_faulthandler(LOADER)}
    assert sentence(texts, rank0="ddp_all_reduce", rank1="ddp_all_reduce") == (
        "Rank 2 stands in dataloader.py:1314 in _try_get_data, called from train.py:55 in step; "
        "2 others wait in ddp_all_reduce (graph.py:979), called from train.py:60 in step."
    )


def test_ranks_in_different_collectives_at_the_same_place_are_two_groups() -> None:
    texts = dict.fromkeys(range(3), by_faulthandler(BACKWARD))
    text = sentence(texts, rank0="broadcast", rank1="ddp_all_reduce", rank2="ddp_all_reduce")
    assert text.startswith(
        "Rank 0 waits in broadcast (graph.py:979), called from train.py:60 in step; 2 others wait in"
    )


def test_a_rank_that_differs_in_a_thread_of_autograd_is_named_with_its_call() -> None:
    texts = {0: by_faulthandler(BACKWARD), 1: by_faulthandler(BACKWARD), 2: by_py_spy(BACKWARD, HOOK_IN_BACKWARD)}
    assert sentence(texts).startswith("Rank 2 stands in train.py:9 in on_gradient; 2 others stand in graph.py:979 in")


def test_threads_of_python_count_if_no_main_thread_differs() -> None:
    texts = dict.fromkeys((0, 1), by_faulthandler(WAIT)) | {2: by_faulthandler(WAIT, SAVE)}
    assert sentence(texts).startswith(
        "Rank 2 stands in save.py:12 in write, in the thread write; 2 others wait in all_"
    )
    texts[1] = by_faulthandler(FILTER)
    assert [group.ranks for group in group_stacks(texts)] == [[1], [0, 2]]


def test_ranks_without_stacks_are_groups_by_their_reason() -> None:
    texts = {rank: by_faulthandler(WAIT) for rank in range(5)}
    absent = {5: "stopped (state T)", 6: "stopped (state T)", 7: "no answer within 5 s"}
    assert sentence(texts, absent).startswith(
        "Rank 7 gives no stacks: no answer within 5 s; ranks 5-6 give no stacks: stopped (state T); 5 others wait in"
    )
    assert sentence({}, {0: "stopped (state T)"}) == "Rank 0 gives no stacks: stopped (state T)."


def test_of_two_ranks_the_one_outside_a_collective_is_first() -> None:
    assert sentence({0: by_faulthandler(WAIT), 1: by_faulthandler(FILTER)}).startswith(
        "Rank 1 stands in dataset.py:31 in filter; rank 0 waits in all_reduce"
    )


def test_many_groups_are_counted() -> None:
    texts = {rank: by_faulthandler(((f"f{rank}", "/home/u/a.py", rank), *LAUNCH)) for rank in range(9)}
    assert sentence(texts) == (
        "Rank 0 stands in a.py in f0; rank 1 stands in a.py:1 in f1; rank 2 stands in a.py:2 in f2; "
        "5 in 5 more groups differ, too; rank 8 stands in a.py:8 in f8."
    )


def test_arguments_of_the_process_are_not_shown() -> None:
    [group] = group_stacks({0: by_py_spy(WAIT)})
    assert "secret" not in "".join(group.lines)


@pytest.mark.parametrize("text", ["", "Error: nothing", "\0" * 100, "Thread 1 (idle)", "Thread 0x1 (most recent call"])
def test_an_answer_without_stacks_is_no_error(text: str) -> None:
    [group] = group_stacks({0: text})
    assert isinstance(group, StackGroup)
    assert describe_difference([group]).startswith("Rank 0 ")


@pytest.mark.parametrize("piece", [" (", ") [", '", line 1', "Thread 0x1 (", '  File "', "1", "Thread 1 (idle)\n"])
def test_of_a_hostile_text_little_is_kept(piece: str) -> None:
    for before in ("", "Thread 0x1 (", "Thread 1 (idle)\n    f (", '  File "'):
        text = before + piece * (2**20 // len(piece))  # a quadratic match of it takes hours
        assert len(read_threads(text)) <= THREADS_LIMIT
        [group] = group_stacks({0: text})
        assert len(group.lines) <= 2 * FRAMES_SHOWN
        assert len(describe_difference([group])) < 3 * LINE_LIMIT
