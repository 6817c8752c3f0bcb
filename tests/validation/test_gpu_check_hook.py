"""The hook's part of gpu-check: what it reads in a trace, how it judges, and that its job trains, here on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from validation.gpu_check import hook, hook_job, trace
from validation.gpu_check.hook_ways import WAYS
from validation.gpu_check.report import Check

from rankscope.record.sampling import is_sampled

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


def test_a_stall_is_what_others_do_while_the_main_stream_does_nothing() -> None:
    assert trace.stalls(TRACE, "optimizer") == [pytest.approx(2.0)]  # and not from 4.5 to 6, when nobody worked


def test_what_others_do_behind_the_main_streams_work_is_no_stall() -> None:
    hidden = work("kernel", "ncclDevKernel_AllReduce", issued=0.31, began=0.3, seconds=0.5, stream=20)
    late = work("kernel", "spin_kernel", issued=0.6, began=5.0, seconds=0.25, stream=21)
    assert trace.stalls([*TRACE, *hidden, *late], "optimizer") == [pytest.approx(2.0), pytest.approx(0.25)]


def test_a_step_lasts_from_the_end_of_an_optimizers_work_to_that_of_the_next() -> None:
    assert trace.steps(TRACE, "optimizer") == []
    later = [event("user_annotation", "optimizer", began=0.8, seconds=0.1)]
    later += work("kernel", "sgd", issued=0.85, began=9.0, seconds=0.5, stream=7)
    assert trace.steps([*later, *TRACE], "optimizer") == [pytest.approx(3.0)]


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
    "steps": [0.3, 0.35, 0.35],
    "profiler_steps": [0.35, 0.35],
    "is_alone": False,
}
ALONE = {
    **TIMELINE,
    "is_alone": True,
    "host": {"other": 0.1, "collective_wait": 0.02, "device_wait": 0.8},
    "waited": 0.8,
    "device_waits": 4,
    "waits": 4,
    "collectives": {"all_gather": 6.0, "reduce_scatter": 3.0},
    "issued": {"all_gather": 6, "reduce_scatter": 3},
}
GAPS = {
    "check": "gaps",
    "rank": 0,
    "found": {
        "busy": {"dry": {"forward": 0.001}, "device": 1.0},
        "launch-bound": {"dry": {"forward": 0.2, "backward": 0.1}, "device": 0.4},
        "pausing": {"dry": {"other": 0.31, "forward": 0.1}, "device": 0.5},
    },
    "paused": 0.3,
}
SAMPLING = {
    "check": "sampling",
    "rank": 0,
    "numbers": [2, 3, *(step for step in range(16, 300) if is_sampled(step, 4))],
    "device": 0.1,
    "host": 0.101,
    "step": 0.001,
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
        "whole steps": "ok",
        "each step": "ok",
        "other": "measured",
        "backward": "measured",
        "collective_wait": "measured",
        "cudaDeviceSynchronize": "ok",
        "what set_sync_debug_mode objects to": "ok",
        "parameters": "ok",
    }


def test_what_agrees_of_one_rank_alone_is_ok() -> None:
    assert outcomes(ALONE).items() - outcomes(TIMELINE).items() == {
        ("collective_wait of the host", "ok"),
        ("device_wait of the host", "ok"),
        ("device waits", "ok"),
        ("all_gather", "ok"),
        ("reduce_scatter", "ok"),
    }
    assert set(outcomes(GAPS).values()) == set(outcomes(SAMPLING).values()) == {"ok"}


def test_a_host_that_waits_for_the_communication_differs() -> None:
    host = {**ALONE["host"], "collective_wait": 0.2}  # type: ignore[dict-item]
    assert outcomes({**ALONE, "host": host})["collective_wait of the host"] == "differs"


def test_a_collective_that_was_not_seen_differs() -> None:
    assert outcomes({**ALONE, "collectives": {"all_gather": 6.0}})["reduce_scatter"] == "differs"


def test_a_read_that_was_not_seen_differs() -> None:
    assert outcomes({**ALONE, "device_waits": 3})["device waits"] == "differs"


def test_a_step_that_is_missing_or_of_another_length_differs() -> None:
    assert outcomes({**TIMELINE, "steps": [0.35, 0.35]})["whole steps"] == "differs"
    assert outcomes({**TIMELINE, "steps": [0.3, 0.35, 0.36]})["each step"] == "differs"


def test_a_busy_device_that_is_called_dry_differs_and_a_dry_one_that_is_not() -> None:
    found = {
        "busy": {"dry": {"forward": 0.1}, "device": 1.0},
        "launch-bound": {"dry": {}, "device": 1.0},
        "pausing": {"dry": {}, "device": 1.0},
    }
    assert set(outcomes({**GAPS, "found": found}).values()) == {"differs"}


def test_steps_that_are_no_sample_differ() -> None:
    assert outcomes({**SAMPLING, "numbers": list(range(1, 300, 16))})["measured steps"] == "differs"
    assert outcomes({**SAMPLING, "numbers": []})["measured steps"] == "differs"


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


def test_the_cost_comes_with_its_control(trained: list[Check]) -> None:
    assert [check.about for check in trained if check.outcome == "measured" and "rank 0" in check.about] == [
        "job, rank 0: hook",
        "job, rank 0: hook, every step measured",
        "job, rank 0: control",
    ]


def test_with_a_devices_clock_the_cost_of_a_mark_comes_too_and_how_many_there_are() -> None:
    cost = {"check": "overhead", "rank": 0, "step": 900.0, "hook": [50, 40, 60], "control": [0, -1, 1]}
    cost |= {"hook, every step measured": [150, 140, 160], "marks in a step": 10, "seconds": 6}
    assert outcomes({**cost, "marks in a second": 9})["a mark"] == "measured"
    assert outcomes({**cost, "marks in a second": 9})["marks a second"] == "ok"
    assert outcomes({**cost, "marks in a second": 20})["marks a second"] == "differs"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ddp"])
def test_every_way_trains_with_and_without_the_hook(way: str) -> None:
    (check,) = hook.judged(way, hook.run(1, [*SMALL, f"--way={way}", "--pairs=0"]))
    assert (check.about, check.outcome) == (f"{way}, rank 0: parameters", "ok")


def test_a_way_that_this_torch_does_not_have_is_skipped() -> None:
    (check,) = hook.judged("fsdp2", [{"skipped": "torch 2.4 has none"}])
    assert check == Check(hook.PART, "fsdp2", "skipped", note="torch 2.4 has none")


def test_a_check_that_fails_costs_only_itself() -> None:
    def broken() -> dict[str, object]:
        raise ValueError("no such thing")

    (check,) = hook.judged("job", [hook_job.attempt(broken, rank=1)])
    assert (check.outcome, check.note) == ("failed", "broken, rank 1: ValueError: no such thing")


def test_a_job_that_hangs_is_ended_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "JOB_LIMIT", 0.0)
    (check,) = hook.judged("job", hook.run(1, SMALL))
    assert (check.outcome, check.note) == ("failed", "did not end within 0 s.")


def test_a_job_that_fails_says_why() -> None:
    (check,) = hook.judged("job", hook.run(1, ["--backend=none-such", *SMALL[1:]]))
    assert check.outcome == "failed"
    assert "none-such" in check.note


def test_without_a_gpu_for_torch_one_line_says_so() -> None:
    (check,) = hook.hook()
    assert check == Check(hook.PART, "this part", "skipped", note=f"torch {torch.__version__} sees no GPU")
