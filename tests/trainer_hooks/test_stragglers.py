"""One slow rank of four: the records identify it and its phase. All cases: `make stragglers`."""

from __future__ import annotations

from validation import stragglers
from validation.stragglers import Limits, culprits

LIMITS = Limits(lag=0.15, cause_share=0.3)
STEP = {"forward": 0.2, "backward": 0.3, "collective_wait": 0.4, "other": 0.1}


def test_the_slow_rank_and_its_phase_are_named_in_each_kind_of_training() -> None:
    cases = ["ddp:data_wait:1", "by_hand:optimizer:2", "fsdp2:backward:3"]
    results = [stragglers.judge(observed) for observed in stragglers.observe(cases, steps=15)]
    # On a busy machine another rank may lag as well, which this does not test.
    named = {result["case"]: result["named"].get(result["case"][-1]) for result in results}
    assert named == dict(zip(cases, ("data_wait", "optimizer", "backward"), strict=True))


def test_no_rank_is_named_if_all_ranks_wait_equally() -> None:
    assert culprits(dict.fromkeys("0123", STEP), LIMITS) == {}


def test_a_lag_that_no_phase_explains_has_an_unknown_cause() -> None:
    slow = {"forward": 0.25, "backward": 0.35, "collective_wait": 0.2, "other": 0.1, "mine": 0.05, "yours": 0.05}
    assert culprits({"0": STEP, "1": slow, "2": STEP, "3": STEP}, LIMITS) == {"1": "unknown"}


def test_a_phase_that_only_one_rank_has_is_an_excess() -> None:
    slow = {"forward": 0.2, "backward": 0.3, "other": 0.1, "tokenize": 0.4}
    assert culprits({"0": STEP, "1": STEP, "2": STEP, "3": slow}, LIMITS) == {"3": "tokenize"}


def test_two_slow_ranks_of_five_are_both_named() -> None:
    slow = {"forward": 0.5, "backward": 0.3, "collective_wait": 0.1, "other": 0.1}
    assert culprits({"0": STEP, "1": slow, "2": STEP, "3": slow, "4": STEP}, LIMITS) == {"1": "forward", "3": "forward"}
