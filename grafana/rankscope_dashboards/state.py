"""The state of a run and its duration, from the metrics of its ranks, or their last metrics if no rank is alive."""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.panels import NORMAL, Query, value
from rankscope_dashboards.phases import PLANNED
from rankscope_dashboards.selectors import LIVE_RANKS, RUN_ONLY, age, first_of, live
from rankscope_exporter.report.colors import BAD, CAUTION, NEUTRAL


def last_seen(selector: str) -> str:
    """Return the query of the time at which Prometheus last scraped each series in the time range."""
    return f"max_over_time(timestamp({selector})[$__range:])"


ENDINGS = last_seen(f"rankscope_rank_exit_info{{{RUN_ONLY}}}")
CRASHES = last_seen(f'rankscope_rank_exit_info{{{RUN_ONLY},reason=~"exception|killed"}}')
# Ranks that are not alive and whose last exit was a crash: a restarted run may have finished since.
CRASHED = (
    f"(max by (run, owner, rank) ({CRASHES}) == max by (run, owner, rank) ({ENDINGS}))"
    f" unless on (run, owner, rank) {LIVE_RANKS}"
)
ENDED_FOR = age(f"last_over_time(rankscope_rank_exit_timestamp_seconds{{{RUN_ONLY}}}[$__range])")
HANG = age(f'rankscope_finding_since_timestamp_seconds{{{RUN_ONLY},kind="hang"}}')
STALL = f"min by (run, owner) ({live(age(f'rankscope_rank_last_progress_timestamp_seconds{{{RUN_ONLY}}}'))})"
IN_PLANNED_PHASE = f'rankscope_rank_phase_since_timestamp_seconds{{{RUN_ONLY},phase=~"{PLANNED}"}}'
NO_PROGRESS_AFTER = 30
"""Seconds without progress outside of start-up, checkpoint and evaluation."""

# The first one that has data is shown, with its color; later ones may have data, too.
STATES = {
    "crashed": (BAD, f"max({ENDED_FOR} and on (run, owner, rank) {CRASHED})"),
    "hung": (BAD, f"max({HANG})"),
    "no progress": (CAUTION, f"max({STALL} > {NO_PROGRESS_AFTER} unless on (run, owner) {IN_PLANNED_PHASE})"),
    "running": (NORMAL, f"max({STALL})"),
    "ended": (NEUTRAL, f"min({ENDED_FOR})"),
    "not seen": (NEUTRAL, f"time() - max({last_seen(f'rankscope_rank_info{{{RUN_ONLY}}}')})"),
}

STATE = value(
    "State",
    "The run's state, and the time since its last progress, its end, or the start of the hang. `hung`: the diagnosis "
    f"has found a hang. `no progress`: no rank has made progress for {NO_PROGRESS_AFTER} s, outside of start-up, "
    "checkpoint and evaluation. `crashed`: a rank was killed or ended with an exception, and was not restarted.",
    "s",
    Query(first_of("state", {name: vector for name, (_, vector) in STATES.items()}), "{{state}}"),
    colors={name: color for name, (color, _) in STATES.items()},
    text=BigValueTextMode.VALUE_AND_NAME,
    empty="unknown",
    width=3,
)
