"""Findings in words: two significant digits at the most, and a sentence and advice for all that detectors yield."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.record import phases
from rankscope.record.quantities import duration, percent
from rankscope_exporter.diagnosis import standstill
from rankscope_exporter.diagnosis.detectors import (
    KINDS,
    checkpoint,
    crash,
    hang,
    not_finite,
    out_of_memory,
    utilization,
)
from rankscope_exporter.diagnosis.detectors.late import UNKNOWN
from rankscope_exporter.diagnosis.findings import Candidate, Place
from rankscope_exporter.diagnosis.priority import EXPLAINED_BY, EXPLAINED_BY_CAUSE, explanation
from rankscope_exporter.diagnosis.words import WORDS, advice, sentence

PLACE = Place(3, "0-7", "node-a", "5", "GPU-3")
UNPLANNED = [phase for phase in phases.NAMES if phase not in (*phases.PLANNED, "collective_wait")]
CAUSES: dict[str, list[str]] = {
    "straggler": [
        *UNPLANNED,
        "tokenize",
        UNKNOWN,
        "throttled",
        "foreign_process",
        "cpu_contention",
        "aggregation",
        "expert_imbalance",
    ],
    "rotating_straggler": [
        "gc",
        "spikes",
        "uneven_work",
        UNKNOWN,
        *(one for one in UNPLANNED if one not in phases.COMPUTING),
    ],
    "data": ["cpu", "io", "unknown"],
    "stage_imbalance": [*(phase for phase in UNPLANNED if phase != "startup"), UNKNOWN],
    "network": ["network", "link", "unknown"],
    "small_collectives": ["", "parallelism"],
    "slowdown": ["throttled", "clocks", "foreign_process", "cpu_contention", "io", "other", "unknown"],
    hang.KIND: [
        *phases.NAMES,
        "tokenize",
        standstill.INSIDE,
        standstill.FINISHED,
        standstill.STOPPED,
        standstill.MISSING,
    ],
    crash.KIND: ["killed", "exception", crash.LOST_PEER, *sorted(crash.LACKING | crash.LEFT)],
    not_finite.KIND: ["loss", "gradient_norm"],
    out_of_memory.KIND: ["growing", "foreign_process", "fragmentation", "too_little_capacity", "unknown"],
    checkpoint.OVERDUE: ["overdue", "never"],
    utilization.LOW: ["batch_too_small", "memory_bound", "unknown"],
}
CANDIDATES = [
    Candidate(kind, 0.3, cause, PLACE, {"age": 20_000.0, "scale": 0.001})
    for kind in KINDS
    for cause in CAUSES.get(kind, [""])
]
RUN = ("llm", "1000")


def test_the_causes_of_every_kind_with_words_by_cause_are_listed() -> None:
    assert {kind for kind, words in WORDS.items() if set().union(*words.values()) - {""}} == CAUSES.keys()


def name(candidate: Candidate) -> str:
    return f"{candidate.kind} {candidate.cause}"


@pytest.mark.parametrize("candidate", CANDIDATES, ids=name)
def test_everything_that_detectors_yield_has_a_sentence_and_advice(candidate) -> None:
    said, first = sentence(RUN, candidate), advice(candidate)
    assert re.fullmatch(r"[A-Z].*[^.:]", said)
    assert "llm" in said
    assert first.endswith(".")
    for text in (said, first):
        assert not re.search(r"None|[{}<>]|\bunknown$", text)


@pytest.mark.parametrize("candidate", [one for one in CANDIDATES if one.kind in ("straggler", "crash")], ids=name)
def test_the_sentence_about_a_rank_says_where_it_is(candidate) -> None:
    assert sentence(RUN, candidate).startswith("Rank 3 (node-a, GPU 5)")


def test_sentences_are_for_people() -> None:
    slow = Candidate("straggler", 0.3016, "other", Place(0, node="vm", gpu="0"))
    assert sentence(RUN, slow) == "Rank 0 (vm, GPU 0) slows down run llm by 30%: extra work outside the model"
    assert "`rankscope stacks --rank 0` on vm" in advice(slow)
    hangs = Candidate("hang", 1.0, "data_wait", Place(2))
    assert sentence(RUN, hangs) == "Run llm hangs: Rank 2 is stuck in data_wait"


def test_no_words_are_for_what_no_detector_yields() -> None:
    assert WORDS.keys() == {candidate.kind for candidate in CANDIDATES}
    for kind, words in WORDS.items():
        assert set().union(*words.values()) <= {*CAUSES.get(kind, ()), ""}


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.4449, "44%"),
        (0.0629, "6.3%"),
        (0.007, "0.7%"),
        (1.0, "100%"),
        (0.0, "0%"),
        (0.0995, "10%"),
        (0.0004, "0.04%"),
        (-0.0025, "0%"),
        (-0.3, "0%"),
    ],
)
def test_a_ratio_in_words(ratio, text) -> None:
    assert percent(ratio) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (40.0, "40 s"),
        (99.4, "99 s"),
        (99.6, "1.7 min"),
        (107.0, "1.8 min"),
        (180.0, "3 min"),
        (1200.0, "20 min"),
        (6000.0, "1.7 h"),
        (14_400.0, "4 h"),
        (90_000.0, "25 h"),
        (864_000.0, "10 days"),
    ],
)
def test_a_time_in_words(seconds, text) -> None:
    assert duration(seconds) == text


@given(st.floats(0.0, 1e7))
def test_a_time_has_two_significant_digits_at_the_most(seconds) -> None:
    digits = re.sub(r"[^0-9]", "", duration(seconds)).lstrip("0")
    assert len(digits) <= 2 or seconds > 99 * 86_400


@given(st.floats(0.0, 0.99))
def test_a_ratio_has_two_significant_digits_at_the_most(ratio) -> None:
    text = percent(ratio)
    assert len(re.sub(r"[^0-9]", "", text).lstrip("0")) <= 2
    assert "e" not in text


def test_what_explains_which_is_of_kinds_that_there_are() -> None:
    kinds = {*EXPLAINED_BY, *(kind for others in EXPLAINED_BY.values() for kind in others)}
    kinds |= {kind for kind, _ in (*EXPLAINED_BY_CAUSE, *EXPLAINED_BY_CAUSE.values())}
    assert kinds <= WORDS.keys()


def test_throttling_is_explained_by_a_straggler_that_is_throttled_alone() -> None:
    throttling = Candidate("throttling", 0.2)
    throttled, slow = Candidate("straggler", 0.3, "throttled"), Candidate("straggler", 0.3, "forward")
    assert explanation(throttling, [throttling, throttled]) == throttled
    assert explanation(throttling, [throttling, slow]) is None


def test_nothing_explains_itself_and_no_two_explain_each_other() -> None:
    for kind, others in EXPLAINED_BY.items():
        assert kind not in others
        assert all(kind not in EXPLAINED_BY.get(other, ()) for other in others)


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        ({"port_rate": 0.5}, "port mlx5_3 of node-a runs at 50% of its peers' rate"),
        ({"port_down": 2.0}, "port mlx5_3 of node-a is or was down"),
        ({"port_errors": 1234.0}, "port mlx5_3 of node-a has 1200 errors per second"),
        ({"port_drops": 0.013}, "port mlx5_3 of node-a drops 1.3% of its packets"),
    ],
)
def test_a_port_at_fault_is_named_with_what_is_wrong(evidence, said) -> None:
    candidate = Candidate("network", 0.3, "link", Place(node="node-a", port="mlx5_3"), {"straggler": 0.1, **evidence})
    assert sentence(RUN, candidate).endswith(said)


def test_a_slow_link_is_named_with_its_group() -> None:
    candidate = Candidate("network", 0.3, "link", Place(group="2-3"), {"link_wait": 0.3, "peers_wait": 0.1})
    assert sentence(RUN, candidate).endswith("the link between ranks 2-3 is slow")


@pytest.mark.parametrize(("kind", "place"), [("straggler", PLACE), ("rotating_straggler", Place())])
def test_late_data_of_some_ranks_is_explained_where_every_ranks_data_is_late(kind, place) -> None:
    late, slow = (Candidate(kind, 0.3, cause, place) for cause in ("data_wait", "forward"))
    every = Candidate("data", 0.3, "cpu")
    assert explanation(late, [late, every]) is every
    assert explanation(slow, [slow, every]) is None
    assert explanation(every, [late, every]) is None


def test_transfer_is_explained_by_a_rank_that_aggregates_for_the_others_and_by_no_other_straggler() -> None:
    transfer = Candidate("network", 0.3, "network")
    aggregating, slow = (Candidate("straggler", 0.3, cause, PLACE) for cause in ("aggregation", "forward"))
    assert explanation(transfer, [transfer, aggregating]) is aggregating
    assert explanation(transfer, [transfer, slow]) is None
    assert explanation(aggregating, [transfer, aggregating]) is None


SETS = [
    (Place(ranks=(4, 5, 6, 7), node="node-a"), "4-7", "Set of ranks 4-7 (node-a)"),
    (Place(ranks=(0, 2, 5)), "0,2,5", "Set of ranks 0,2,5"),
    (Place(ranks=(3, 7), node="node-a", place="context 3"), "3,7", "Context place 3 (ranks 3,7, node-a)"),
    (Place(ranks=tuple(range(512))), "512 ranks", "Set of 512 ranks"),
    (Place(ranks=(2, 3), node="n", gpu="1", uuid="u", place="GPU 1"), "2-3", "GPU 1 (ranks 2-3, n)"),
    (
        Place(ranks=tuple(range(8)), node="n", place="node n", also="expert 1"),
        "0-7",
        "Node n (ranks 0-7, expert place 1)",
    ),
    (
        Place(3, "", "n", "3", "u", ranks=(3,), place="GPU 3", also="context 3"),
        "3",
        "Rank 3 (n, GPU 3, context place 3)",
    ),
    (Place(3, "", "n", ranks=(3,), place="context 3", also="GPU 3"), "3", "Context place 3 (rank 3, n, GPU 3)"),
]


@pytest.mark.parametrize(("place", "label", "named"), SETS)
def test_a_set_of_late_ranks_is_named_by_its_place_and_its_ranks(place: Place, label: str, named: str) -> None:
    candidate = Candidate("straggler", 0.2, "backward", place)
    assert place.rank_label == label
    assert sentence(RUN, candidate).startswith(f"{named} slows down run ")
    command = "stacks" if len(place.ranks) > 8 else f"stacks --rank {label}"
    assert f"`rankscope {command}`" in advice(Candidate("straggler", 0.2, "other", place))


def test_few_ranks_that_are_late_in_turn_are_named() -> None:
    candidate = Candidate("rotating_straggler", 0.3, "uneven_work", Place(ranks=(1, 3, 5)))
    assert sentence(RUN, candidate).startswith("Ranks 1,3,5 of run ")
