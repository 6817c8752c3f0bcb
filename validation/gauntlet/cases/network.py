"""Faults of collectives and of the network."""

from __future__ import annotations

from validation.gauntlet.arena import Arena
from validation.gauntlet.case import Case, Target, alert, all_ranks, drawn_rank, lagging, rank_zero


def slow_link(arena: Arena, target: Target) -> None:
    arena.change_gpu(target.rank, nvlinks_down=9)
    arena.change_ranks(ranks={target.rank: {"transfer": target.extra_ms}})


def aggregate_on_rank_zero(arena: Arena, target: Target) -> None:
    arena.change_gpu(0, busy=0.3, memory_used="15 GiB")
    arena.change_ranks(common={"aggregate": target.extra_ms})


FAULTS = {
    # A GPU has lost NVLinks: results of collectives come late to its rank.
    "f13_slow_link": Case(
        "one slow link",
        slow_link,
        alert("RankscopeTransferBound", "link"),
        drawn_rank,
        simulated="the links; the delay is slept in the collective",
    ),
    # The transfer takes longer for all ranks; no rank comes late.
    "f14_congested_network": Case(
        "congested network",
        all_ranks(lambda target: {"transfer": target.extra_ms}),
        alert("RankscopeTransferBound", "network"),
        simulated="the delay, slept in the collective",
    ),
    # Rank 0 receives the weights of all ranks, works on them and sends the result; its GPU has more load and memory.
    "f21_rank_zero_aggregates": Case(
        "rank 0 aggregates",
        aggregate_on_rank_zero,
        lagging("aggregation"),
        rank_zero,
        simulated="its GPU's load and memory",
    ),
    # After every batch the ranks agree on many single numbers. Each takes a millisecond, or two on a busy machine.
    "f22_synchronized_metrics": Case(
        "metrics synchronized on every batch",
        all_ranks(lambda target: {"small_collectives": round(target.extra_ms)}),
        alert("RankscopeSmallCollectives"),
    ),
}
