"""The tile at the top of the dashboard *Run*: the run's state and its worst problem, in one sentence."""

from __future__ import annotations

from rankscope_dashboards.findings import MINUTES, first_said, in_words, said, worst_finding
from rankscope_dashboards.panels import NORMAL, Query, sentence
from rankscope_dashboards.phases import PLANNED
from rankscope_dashboards.selectors import LIVE_RANKS, RUN_ONLY, age, live
from rankscope_exporter.report.colors import BAD, CAUTION, NEUTRAL


def last_seen(selector: str) -> str:
    """Return the query of the time at which Prometheus last scraped each series in the time range, to a minute."""
    return f"max_over_time(timestamp({selector})[$__range:1m])"


ENDINGS = last_seen(f"rankscope_rank_exit_info{{{RUN_ONLY}}}")
CRASHES = last_seen(f'rankscope_rank_exit_info{{{RUN_ONLY},reason=~"exception|killed"}}')
# Ranks that are not alive and whose last exit was a crash: a restarted run may have finished since.
CRASHED = (
    f"(max by (run, owner, rank) ({CRASHES}) == max by (run, owner, rank) ({ENDINGS}))"
    f" unless on (run, owner, rank) {LIVE_RANKS}"
)
ENDED_FOR = age(f"last_over_time(rankscope_rank_exit_timestamp_seconds{{{RUN_ONLY}}}[$__range])")
CRASHED_FOR = f"max({ENDED_FOR} and on (run, owner, rank) {CRASHED})"
STALL = f"min by (run, owner) ({live(age(f'rankscope_rank_last_progress_timestamp_seconds{{{RUN_ONLY}}}'))})"
IN_PLANNED_PHASE = f'rankscope_rank_phase_since_timestamp_seconds{{{RUN_ONLY},phase=~"{PLANNED}"}}'
NO_PROGRESS_AFTER = 30
"""Seconds without progress outside of start-up, checkpoint and evaluation."""
WITHOUT_PROGRESS = f"max({STALL} > {NO_PROGRESS_AFTER} unless on (run, owner) {IN_PLANNED_PHASE})"
UNSEEN_FOR = f"time() - max({last_seen(f'rankscope_rank_info{{{RUN_ONLY}}}')})"
JUDGED = f"rankscope_run_judged_info{{{RUN_ONLY}}}"
ALIVE = f'count_values ("ranks", count(max by (rank) ({LIVE_RANKS})))'

# The collective that most ranks are in, and its number.
_OPEN = f"topk(1, count by (op, group) (rankscope_rank_collective_open_info{{{RUN_ONLY}}}))"
_NUMBERS = f"max by (group) (rankscope_rank_group_collectives_total{{{RUN_ONLY}}})"
_NUMBERED = f'count_values by (group) ("number", {_NUMBERS}) * on (group) group_left (op) {_OPEN}'
COLLECTIVE = f'label_join({_NUMBERED}, "collective", " ", "op", "number")'


def lasting(begin: str, seconds: str, *rest: str) -> str:
    """Return the query of `begin` and the minutes, then `rest`, if `seconds` has data."""
    return said(in_words(seconds, "", MINUTES), begin, "{for}", *rest)


SENTENCES = (
    worst_finding("critical", RUN_ONLY, collective=COLLECTIVE),
    lasting("CRASHED ", CRASHED_FOR, " ago: a rank was killed or ended with an exception"),
    lasting("NO PROGRESS for ", WITHOUT_PROGRESS, ": no rank ends a step, a pass or a collective"),
    worst_finding("warning", RUN_ONLY),
    said(
        f"{ALIVE} unless on () {JUDGED}", "NOT DIAGNOSED: ", "{ranks}", " ranks alive, and nothing looks for problems"
    ),
    said(ALIVE, "RUNNING: no problem found, ", "{ranks}", " ranks alive"),
    said(in_words(f"min({ENDED_FOR})", ""), "ENDED ", "{for}", " ago"),
    lasting("NOT SEEN for about ", UNSEEN_FOR, ": its ranks have no exporter now"),
    said("vector(1)", "NO DATA: no rank of this run in this time range"),
)
COLORS = {
    **dict.fromkeys(("CRITICAL", "CRASHED", "HUNG"), BAD),
    **dict.fromkeys(("WARNING", "NO PROGRESS"), CAUTION),
    **dict.fromkeys(("NOT", "NO DATA", "ENDED"), NEUTRAL),
    "RUNNING": NORMAL,
}

VERDICT = sentence(
    "Verdict",
    "The run's state and its worst problem, in the words of the diagnosis. `NO PROGRESS`: no rank has made progress "
    f"for {NO_PROGRESS_AFTER} s, outside of start-up, checkpoint and evaluation. `NOT DIAGNOSED`: no exporter or "
    "analyzer judges the run, so problems are not found.",
    Query(first_said(SENTENCES), "{{said}}"),
    colors=COLORS,
)
