"""The row of the dashboard *Fleet* about all runs: one line for each, the worst first.

The diagnosis says what is wrong, and no query looks for faults itself. What nothing diagnoses, or nothing shows any
more, has a state of its own.
"""

from __future__ import annotations

from dataclasses import replace

from grafana_foundation_sdk.models import dashboard as sdk

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.links import RANK_ZERO, RUNBOOK_OF_KIND, TO_ADVICE, TO_NODE, TO_RUN
from rankscope_dashboards.panels import NORMAL, Panel, Query, override
from rankscope_dashboards.prices import priced
from rankscope_dashboards.selectors import EXPORTER, age
from rankscope_dashboards.tables import Column, or_words, table_of
from rankscope_exporter.report.colors import BAD, CAUTION, NEUTRAL

RUNS = 100
"""The most lines of a table."""
FINDING = "run, owner, kind, cause, severity, rank, group, node, gpu, uuid, port, place"
WORTH_LESS = 'cause!~"none|unknown"'

ALIVE = "group by (run, owner) (rankscope_rank_up == 1)"
JUDGED = "group by (run, owner) (rankscope_run_judged_info)"
PARTLY_JUDGED = "group by (run, owner) (rankscope_analyzer_run_not_judged_info)"
# Whether that is a crash, the diagnosis decides: if all ranks are gone at once, the run may have ended normally.
FAILED = 'group by (run, owner) (last_over_time(rankscope_rank_exit_info{reason=~"exception|killed"}[1h]))'
EXITS = "last_over_time(rankscope_rank_exit_timestamp_seconds[1h])"
# Ranks that had not ended when an exporter last showed them.
NOT_SEEN = (
    "group by (run, owner) (last_over_time(rankscope_rank_up[1h]) == 1 unless on (run, owner, rank) rankscope_rank_up)"
)
NODES = (
    "topk by (instance) (1, group by (instance, node) (rankscope_exporter_ranks_alive)"
    " or on (instance) group by (instance) (rankscope_exporter_build_info))"
)
"""Each exporter that answers, with its node if it reads ranks."""

NOT_DIAGNOSED, EXPORTER_DOWN, RANK_CRASHED = (
    f"runbooks/Rankscope{name}" for name in ("RunNotDiagnosed", "ExporterDown", "RankCrashed")
)
WHAT_IS_LOOKED_FOR = "diagnosis"
"""Pages of the documentation about runs without a finding."""
HEALTHY = "No open finding"
UNJUDGED = "No exporter or analyzer judges this run"
HALF_JUDGED = "A node of this run does not answer the analyzer"
FAILURE = "A rank was killed or ended with an exception"
UNSEEN = "No exporter shows this run any more, and it had not ended"
NO_RUN = "No exporter shows a run"

# A critical finding is worse than a warning, then the larger loss counts.
SCORE = f"max by ({FINDING}) (10 + rankscope_finding_ratio{{severity='critical'}} or rankscope_finding_ratio)".replace(
    "'", '"'
)
WORST = f"topk by (run, owner) (1, {SCORE})"
FOUND = (
    f"topk by (run, owner) (1, max by ({FINDING}, summary) (rankscope_finding_info)"
    f" * on ({FINDING}) group_left () {SCORE})"
)
FOUND_AGE = f"max by ({FINDING}) ({age(f'max by ({EXPORTER}, {FINDING}) (rankscope_finding_since_timestamp_seconds)')})"


def named(state: str, worth: float, runs: str, words: str = "", page: str = "") -> str:
    """Return the query of these runs with this state, sorted by `worth`, and words with their page."""
    found = f'label_replace({worth:g} * ({runs}), "state", "{state}", "", "")'
    if words:
        found = f'label_replace({found}, "summary", "{words}", "", "")'
        found = f'label_replace({found}, "page", "{page}", "", "")'
    return found


def first_of_run(metric: str, reduce: str) -> str:
    """Return the query of the age of a run's first (`min`) or last (`max`) timestamp."""
    age_of_run = age(f"{reduce} by ({EXPORTER}, run, owner) ({metric})")
    return f"{'max' if reduce == 'min' else 'min'} by (run, owner) ({age_of_run})"


def states() -> str:
    """Return the query of each run's state, with its worst finding: the first that applies."""
    found = f'label_join(label_replace({FOUND} + 5, "state", "$1", "severity", "(.+)"), "page", " ", "kind", "rank")'
    for state, kind in (("hung", "hang"), ("crashed", "crash")):
        found = f'label_replace({found}, "state", "{state}", "kind", "{kind}")'
    others = (
        named("not judged", 3, f"{ALIVE} unless on (run, owner) {JUDGED}", UNJUDGED, NOT_DIAGNOSED),
        named("incomplete", 2, f"{ALIVE} and on (run, owner) {PARTLY_JUDGED}", HALF_JUDGED, NOT_DIAGNOSED),
        named("running", 1, ALIVE, HEALTHY, WHAT_IS_LOOKED_FOR),
        named("not seen", 4, NOT_SEEN, UNSEEN, EXPORTER_DOWN),
        named("ended", 0.5, FAILED, FAILURE, RANK_CRASHED),
        named("ended", 0, f"group by (run, owner) ({EXITS})"),
    )
    lines = f"topk({RUNS}, {' or on (run, owner) '.join((found, *others))})"
    return or_words(lines, "summary", NO_RUN, page=EXPORTER_DOWN)


STATES = {
    "crashed": ("crashed", BAD),
    "hung": ("hung", BAD),
    "critical": ("critical", BAD),
    "warning": ("warning", CAUTION),
    "not seen": ("not seen", CAUTION),
    "not judged": ("not judged", CAUTION),
    "incomplete": ("incomplete", CAUTION),
    "running": ("running", NORMAL),
    "ended": ("ended", NEUTRAL),
}
STARTED = first_of_run(
    f"rankscope_rank_start_timestamp_seconds and on ({EXPORTER}, run, owner, rank) rankscope_rank_up == 1", "min"
)
# A scrape interval after the last one that showed rank 0.
LAST_SEEN = 'time() - max by (run, owner) (max_over_time(timestamp(rankscope_rank_up{rank="0"})[1h:15s]))'
FOR = " or on (run, owner) ".join(
    (
        f"max by (run, owner) ({FOUND_AGE} and on ({FINDING}) {WORST})",
        STARTED,
        f"({LAST_SEEN}) and on (run, owner) ({NOT_SEEN})",
        first_of_run(EXITS, "max"),
    )
)
LOST_NOW = f"sum by (run, owner) (max by (run, owner, cause) (rankscope_run_lost_ratio{{{WORTH_LESS}}}))"


def lost_hours(matchers: str = "") -> str:
    """Return the query of the GPU-hours that runs have lost since they began."""
    # The analyzer's account has no node, and is of the same ranks as those of the nodes' exporters.
    selected = ",".join(filter(None, (matchers, WORTH_LESS)))
    return (
        f'(sum by (run, owner) (max by (run, owner, cause) (rankscope_run_gpu_seconds{{node="",{selected}}}))'
        " or on (run, owner) sum by (run, owner)"
        f' (max by (run, owner, cause, node) (rankscope_run_gpu_seconds{{node!="",{selected}}}))) / 3600'
    )


LOST_HOURS = lost_hours()
USER = 'topk by (run, owner) (1, count by (run, owner, user) (rankscope_rank_info{user!=""}))'
# A rank may save between the readings of the clock and of its record.
CHECKPOINT = f"clamp_min({first_of_run('rankscope_rank_checkpoint_last_timestamp_seconds', 'max')}, 0)"
PLACE = (
    "topk by (run, owner) (1,"
    f" group by (run, owner, node) ({WORST}) * on (node) group_left (instance) topk by (node) (1, {NODES}))"
)


def page_names(column: str) -> sdk.DashboardFieldConfigSourceOverrides:
    """Return the override that replaces a kind of finding and its rank by its runbook: the cell's text, for links."""
    patterns = {"/^straggler 0$/": RUNBOOK_OF_KIND[RANK_ZERO]}
    patterns |= {rf"/^{kind}( .*)?$/": name for kind, name in RUNBOOK_OF_KIND.items() if kind != RANK_ZERO}
    mappings = [
        sdk.RegexMap(
            options=sdk.DashboardRegexMapOptions(pattern, sdk.ValueMappingResult(text=f"runbooks/{name}", index=index))
        )
        for index, (pattern, name) in enumerate(patterns.items())
    ]
    return override(column, mappings=mappings)


def all_runs() -> Panel:
    """Return the table of all runs."""
    panel = table_of(
        "All runs, the worst first",
        "Each run with its worst finding; click on it for what to do. `crashed`, `hung`, `critical`, `warning`: what "
        "the diagnosis has found. `not judged`: no exporter or analyzer judges the run, so nothing is known about "
        "it; `incomplete`: a node does not answer the analyzer. `not seen`: no exporter shows the run any more, and it "
        "had not ended. `For`: the age of the finding, or the time since the start, the end, or the last scrape. "
        "`Lost now`: its GPU time in the last seconds that is lost to any cause, not only that of the finding. "
        "GPU-hours, and their cost if a price is set above, are those since the ranks' start. "
        f"At most {RUNS} runs; ended ones for an hour.",
        [
            Query(states()),
            Query(FOR),
            Query(LOST_NOW),
            Query(LOST_HOURS),
            Query(priced(LOST_HOURS)),
            Query(CHECKPOINT, needs_fault=True),
            Query(USER),
            Query(PLACE, needs_fault=True),
        ],
        [
            Column("state", "State", filterable=True, names=STATES, width=92),
            Column("run", "Run", filterable=True, link=TO_RUN, width=112),
            Column("summary", "Finding", filterable=True, link=TO_ADVICE, wrap=True),
            Column("rank", "Rank", width=46),
            Column("node", "Node", link=TO_NODE, width=68),
            Column("B", "For", "s", width=74, decimals=1),
            Column("C", "Lost now", "percentunit", width=52),
            Column("D", "GPU-hours lost", width=78),
            Column("E", "Cost of lost", width=62),
            Column("F", "Last checkpoint", "s", width=94, decimals=1),
            Column("user", "User", width=60),
            Column("owner", "Owner", hidden=True),
            Column("instance", "Instance", hidden=True),
            Column("page", "Page", hidden=True),
        ],
        height=11,
        empty=NO_RUN,
        sort="A",
    )
    return replace(panel, overrides=(*panel.overrides, page_names("Page")))


ALL_RUNS = Row("Which run, which rank, and why?", (all_runs(),))
