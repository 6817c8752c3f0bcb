"""The dashboard *Run*: what slows down a training run. Details are in collapsed rows.

Results of the diagnosis (lag, cause, lost time, alerts) come from the exporter or the analyzer that diagnoses the run.
No panel computes its own, so that dashboard and notification agree.
"""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.comparison import COMPARISON
from rankscope_dashboards.dashboard import Dashboard, Row, label_values, other_run
from rankscope_dashboards.panels import NORMAL, Query, bars, shares, value
from rankscope_dashboards.phases import PHASE_RATIOS, WAITS
from rankscope_dashboards.ranks import NOW
from rankscope_dashboards.resources import CHECKPOINTS, MEMORY, PROCESSES
from rankscope_dashboards.selectors import LIVE_RANKS, RUN_ONLY, average, or_no_alerts, rate
from rankscope_dashboards.state import STATE
from rankscope_dashboards.tables import Column, table_of
from rankscope_dashboards.throughput import GPUS, SPEED, STEPS
from rankscope_dashboards.waiting import COLLECTIVES, LAG
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.report.colors import BAD, CAUSE_COLORS, PHASE_COLORS

FIRING = f'ALERTS{{alertstate="firing",{RUN_ONLY}}}'
LATE = f'max by (rank, cause) (rankscope_finding_ratio{{{RUN_ONLY},kind="straggler"}})'
ROTATING = f'max by (cause) (rankscope_finding_ratio{{{RUN_ONLY},kind="rotating_straggler"}})'
NOT_USEFUL = ',cause!~"none|unknown"'
# One or several ranks, or a rotating straggler.
LAGGING = f'({LATE} or on () label_replace({ROTATING}, "rank", "(rotating)", "", ""))'
NAMED = f'label_join(label_replace({LAGGING}, "prefix", "rank", "", ""), "who", " ", "prefix", "rank", "cause")'
WHO = f"max by (who) ({NAMED})"
LARGEST_LAG = f"max(rankscope_rank_lag_ratio{{{RUN_ONLY}}})"
MAKES_STEPS = f"max({rate('rankscope_rank_steps_total')}) > 0"
NO_STRAGGLER = (
    f'label_replace({LARGEST_LAG} < {Thresholds().loss} and on () {MAKES_STEPS}, "who", "no straggler", "", "")'
)
BARS = 16
"""The most ranks in a bar chart."""
DEVICE_STEPS = f"rate(rankscope_rank_device_steps_total{{{RUN_ONLY}}}[$__rate_interval])"
MEASURED = f'label_replace({DEVICE_STEPS} > 0, "clock", "device", "", "")'
NOT_MEASURED = f'label_replace({LIVE_RANKS}, "clock", "host", "", "")'


def lost(more: str = "") -> str:
    """Return the query of the run's GPU time by cause, as ratios; `more` are further matchers."""
    return f"max by (cause) (rankscope_run_lost_ratio{{{RUN_ONLY}{more}}})"


VARIABLES = (
    # Generated names end in a time or a count, so the newest run comes first.
    label_values("run", "rankscope_rank_info", label="Run", description="The training run.", descending=True),
    label_values(
        "owner",
        'rankscope_rank_info{run="$run"}',
        label="Owner",
        description="The uid of the run's owner: two users may have runs of the same name.",
    ),
    label_values(
        "rank",
        f"rankscope_rank_info{{{RUN_ONLY}}}",
        label="Rank",
        description="Ranks that the panels by rank show.",
        everything=True,
    ),
    other_run(
        "compare",
        "run",
        label="Compare with",
        description="Another run to compare settings, speed and phases with.",
    ),
)

OVERVIEW = Row(
    "Is anything wrong? Which rank, and why?",
    (
        STATE,
        value(
            "Straggler",
            "The rank that slows down the others, with the cause and its lag as a share of the step; `(rotating)` if "
            "ranks are late in turn. `no straggler` is shown with the largest lag. Unknown while ranks make no steps, "
            "if there is only one rank, and until a lag has lasted.",
            "percentunit",
            Query(f"{WHO} or on () {NO_STRAGGLER}", "{{who}}"),
            steps=((0, BAD),),
            colors={"no straggler": NORMAL},
            text=BigValueTextMode.VALUE_AND_NAME,
            empty="unknown",
            width=4,
        ),
        table_of(
            "Alerts",
            "Alerts that fire for this run.",
            [Query(or_no_alerts(FIRING, LIVE_RANKS))],
            [
                Column("alertname", "Alert"),
                Column("severity", "Severity"),
                Column("rank", "Rank"),
                Column("node", "Node"),
                Column("gpu", "GPU"),
                Column("cause", "Cause"),
                Column("phase", "Phase"),
                Column("reason", "Ended"),
            ],
            width=9,
            height=5,
            empty="no live rank of this run",
        ),
        value(
            "Ranks alive",
            "Ranks of this run whose process is alive, on all nodes.",
            "none",
            Query(f"sum(max by (rank) (rankscope_rank_up{{{RUN_ONLY}}}))"),
            width=3,
        ),
        value(
            "Lost time",
            "Share of the allocated GPU time that was not spent on computing.",
            "percentunit",
            Query(f"sum({lost(NOT_USEFUL)})"),
            width=3,
        ),
        value(
            "Clock",
            "The clock that the ranks' time is measured by: `device` if their GPUs are measured, because the host then "
            "runs ahead of them; otherwise `host`. Both if ranks differ.",
            "none",
            Query(f"group by (clock) ({MEASURED} or on (run, owner, rank) {NOT_MEASURED})", "{{clock}}"),
            text=BigValueTextMode.NAME,
            width=2,
        ),
    ),
)

TIME = Row(
    "Where does the time go?",
    (
        shares(
            "Time by phase",
            "The ranks' time by phase, averaged over the chosen ranks: GPU time if it is measured, otherwise time of "
            "the training threads (see `Clock` above). The phases add up to 100% while ranks are alive. Choose a rank "
            "above to see only its time.",
            Query(average(PHASE_RATIOS, "phase"), "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
        ),
        bars(
            "Time by phase and rank",
            "Each rank's time at the end of the time range, by the same clock. A straggler has little orange, and more "
            f"of another color. At most {BARS} ranks, those that wait least.",
            Query(f"{PHASE_RATIOS} > 0 and on (rank) bottomk({BARS}, {WAITS})"),
            bar="rank",
            part="phase",
            colors=PHASE_COLORS,
            width=8,
            empty="no live ranks",
        ),
        shares(
            "Lost time by cause",
            "The allocated GPU time by cause; blue is computing. `straggler`: waiting for a late rank. `transfer`: "
            "the wait of the rank that waits least. `stall`: all time of a run that hangs. `idle`: GPUs of ranks that "
            "have ended.",
            Query(lost(), "{{cause}}"),
            colors=CAUSE_COLORS,
            width=8,
        ),
    ),
)

RUN = Dashboard(
    uid="rankscope-run",
    title="Run",
    description="One training run: what slows it down, which rank, and why; and a comparison with another run.",
    variables=VARIABLES,
    rows=(
        OVERVIEW,
        SPEED,
        TIME,
        LAG,
        NOW,
        COMPARISON,
        STEPS,
        COLLECTIVES,
        CHECKPOINTS,
        PROCESSES,
        GPUS,
        MEMORY,
    ),
    alerts=FIRING,
)
