"""The hook's part of gpu-check: what it reads in a trace, how it judges, and that its job trains, here on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from benchmarks.gpu_check import hook, trace
from benchmarks.gpu_check.report import Check

SMALL = ("--backend=gloo", "--device=cpu", "--width=8", "--batch=4", "--steps=3", "--pairs=1", "--block=2")


def event(category: str, name: str, began: float, seconds: float, **arguments: object) -> dict[str, Any]:
    """One of the profiler's, which counts in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": began * 1e6, "dur": seconds * 1e6, "args": arguments}


def work(category: str, name: str, issued: float, began: float, seconds: float, stream: int) -> list[dict[str, Any]]:
    """A call of the runtime's and what the device did for it."""
    number = int(issued * 1e6)
    call = event("cuda_runtime", "cudaLaunchKernel", issued, 0.0, correlation=number)
    return [call, event(category, name, began, seconds, correlation=number, stream=stream, bytes=100)]


TRACE = [
    *work("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", issued=0.1, began=0.1, seconds=0.1, stream=7),
    *work("kernel", "gemm", issued=0.2, began=0.2, seconds=1.8, stream=7),
    *work("kernel", "ncclDevKernel_AllReduce", issued=0.3, began=1.0, seconds=3.0, stream=20),
    event("user_annotation", "optimizer", began=0.4, seconds=0.2),
    *work("kernel", "sgd", issued=0.5, began=4.0, seconds=0.5, stream=7),
    *work("kernel", "sgd", issued=0.55, began=6.0, seconds=0.5, stream=7),
    event("cuda_runtime", "cudaDeviceSynchronize", began=0.7, seconds=4.0, correlation=9),
    event("cuda_runtime", "cudaEventQuery", began=0.6, seconds=0.0, correlation=10),
    {"ph": "M", "name": "process_name"},
]


def test_the_stream_waits_from_its_last_work_to_the_optimizers_first() -> None:
    assert trace.waits_before(TRACE, "optimizer") == [pytest.approx(2.0)]


def test_an_optimizer_without_work_on_the_device_has_no_wait() -> None:
    assert trace.waits_before([event("user_annotation", "optimizer", 9, 1), *TRACE], "optimizer") == [pytest.approx(2)]


def test_only_calls_that_wait_are_synchronisations() -> None:
    assert trace.synchronisations(TRACE) == {"cudaDeviceSynchronize": 1}


def test_copies_from_the_host_are_uploads() -> None:
    assert trace.uploaded_bytes(TRACE) == 100


TIMELINE = {
    "check": "timeline",
    "rank": 0,
    "device": {"other": 0.1, "backward": 0.6, "collective_wait": 0.3, "evaluation": 0.0},
    "wall": 1.0,
    "profiler_waits": [0.1, 0.1, 0.1],
}
BESIDES = {
    "check": "besides",
    "rank": 0,
    "ours": {"copy_bytes": 100.0, "cuda_reserved_bytes": 19.0, "cuda_allocated_bytes": 0.0},
    "theirs": {"copy_bytes": 100, "cuda_reserved_bytes": 20, "cuda_allocated_bytes": 10},
}
WAITING = {
    "check": "waiting",
    "rank": 0,
    "calls": {
        "plain": {"cudaDeviceSynchronize": 2},
        "control": {"cudaDeviceSynchronize": 3},
        "hook": {"cudaDeviceSynchronize": 3},
    },
    "objections": {"plain": "", "hook": ""},
}
IDENTICAL = {"check": "identical", "rank": 0, "control": True, "hook": True}


def outcomes(told: Mapping[str, Any]) -> dict[str, str]:
    return {check.about.partition(": ")[2]: check.outcome for check in hook.judged("job", [told])}


def test_what_agrees_is_ok() -> None:
    assert outcomes(TIMELINE) | outcomes(WAITING) | outcomes(IDENTICAL) == {
        "exposed wait": "ok",
        "all phases": "ok",
        "other": "measured",
        "backward": "measured",
        "collective_wait": "measured",
        "cudaDeviceSynchronize": "ok",
        "what set_sync_debug_mode objects to": "ok",
        "parameters": "ok",
    }


def test_copies_agree_to_the_byte_and_what_no_probe_filled_is_only_the_others() -> None:
    assert outcomes(BESIDES) == {
        "copy_bytes": "ok",
        "cuda_reserved_bytes": "ok",
        "cuda_allocated_bytes": "only nvidia-smi",
    }


def test_a_partition_that_lacks_more_than_a_hundredth_differs() -> None:
    assert outcomes({**TIMELINE, "wall": 1.02})["all phases"] == "differs"


def test_a_wait_that_the_profiler_does_not_see_differs() -> None:
    assert outcomes({**TIMELINE, "profiler_waits": [0.1, 0.1]})["exposed wait"] == "differs"


def test_one_more_synchronisation_than_without_the_hook_differs() -> None:
    calls = {**WAITING["calls"], "hook": {"cudaDeviceSynchronize": 3, "cudaEventSynchronize": 1}}
    assert outcomes({**WAITING, "calls": calls})["cudaEventSynchronize"] == "differs"


def test_an_objection_counts_only_where_there_is_none_without_the_hook() -> None:
    objection = "called a synchronizing CUDA operation"
    about = "what set_sync_debug_mode objects to"
    assert outcomes({**WAITING, "objections": {"plain": "", "hook": objection}})[about] == "differs"
    assert outcomes({**WAITING, "objections": {"plain": objection, "hook": objection}})[about] == "measured"


def test_other_parameters_differ_unless_the_training_never_repeats_itself() -> None:
    assert outcomes({**IDENTICAL, "hook": False})["parameters"] == "differs"
    assert outcomes({**IDENTICAL, "hook": False, "control": False})["parameters"] == "measured"


@pytest.fixture(scope="module")
def trained() -> list[Check]:
    """What is judged of two ranks on the CPU."""
    return list(hook.judged("job", hook.run(2, SMALL)))


def test_two_ranks_train_with_and_without_the_hook(trained: list[Check]) -> None:
    assert [(check.about, check.outcome) for check in trained if check.outcome != "measured"] == [
        ("job, rank 0: parameters", "ok"),
        ("job, rank 1: parameters", "ok"),
    ]


def test_the_cost_comes_with_its_control_and_that_of_a_mark(trained: list[Check]) -> None:
    assert [check.about for check in trained if check.outcome == "measured" and "rank 0" in check.about] == [
        "job, rank 0: hook",
        "job, rank 0: hook, every step measured",
        "job, rank 0: control",
        "job, rank 0: a mark",
    ]


def test_a_job_that_fails_says_why() -> None:
    (check,) = hook.judged("job", hook.run(1, ["--backend=none-such", *SMALL[1:]]))
    assert check.outcome == "failed"
    assert "none-such" in check.note


def test_without_a_gpu_for_torch_one_line_says_so() -> None:
    (check,) = hook.hook()
    assert check == Check(hook.PART, "this part", "skipped", note=f"torch {torch.__version__} sees no GPU")
