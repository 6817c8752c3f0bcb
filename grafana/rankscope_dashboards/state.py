"""What a run does, in a word, and since when: by what its ranks show, and when none lives by what they showed last."""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.panels import BAD, CAUTION, NEUTRAL, WELL, Query, value
from rankscope_dashboards.selectors import RUN_ONLY, age, decided, first_of


def last_seen(selector: str) -> str:
    """When Prometheus last saw each of these series in the time range, by its own clock."""
    return f"max_over_time(timestamp({selector})[$__range:])"


ENDINGS = last_seen(f"rankscope_rank_exit_info{{{RUN_ONLY}}}")
CRASHES = last_seen(f'rankscope_rank_exit_info{{{RUN_ONLY},reason=~"exception|killed"}}')
# Ranks that do not live and whose last ending was a crash: a run that was started anew may have ended well since.
CRASHED = (
    f"(max by (run, owner, rank) ({CRASHES}) == max by (run, owner, rank) ({ENDINGS}))"
    " unless on (run, owner, rank) rank:rankscope_rank_info:live"
)
ENDED_FOR = age(f"last_over_time(rankscope_rank_exit_timestamp_seconds{{{RUN_ONLY}}}[$__range])")
HANG = age(f'rankscope_finding_since_timestamp_seconds{{{RUN_ONLY},kind="hang"}}')

# The first that is true, with its color: the next ones may be true as well.
STATES = {
    "crashed": (BAD, f"max({ENDED_FOR} and on (run, owner, rank) {CRASHED})"),
    "stands still": (BAD, f"max({decided(HANG, f'run:rankscope_stuck:seconds{{{RUN_ONLY}}}')})"),
    "no progress": (CAUTION, f"max(run:rankscope_pausing:seconds{{{RUN_ONLY}}})"),
    "running": (WELL, f"max(run:rankscope_stall:seconds{{{RUN_ONLY}}})"),
    "ended": (NEUTRAL, f"min({ENDED_FOR})"),
    "not seen": (NEUTRAL, f"time() - max({last_seen(f'rankscope_rank_info{{{RUN_ONLY}}}')})"),
}

STATE = value(
    "State",
    "What the run does, and since when: for how long it has made no progress, or when it ended. It stands still after "
    "several times the longest standstill that it had before, at the latest when an alert tells it. `crashed`: a rank "
    "was killed or ended with an exception, and does not live again.",
    "s",
    Query(first_of("state", {name: vector for name, (_, vector) in STATES.items()}), "{{state}}"),
    colors={name: color for name, (color, _) in STATES.items()},
    text=BigValueTextMode.VALUE_AND_NAME,
    none="not known",
    width=3,
)
