"""The dashboard *Run*: what holds this run back? From what is wrong and how fast it is to where the time goes and why.

What is open fits the question; detail is in collapsed rows below.

Judgments (lag, cause, time lost, alerts) come from the exporter that judges the run, else from the recording rules, and
never from panels, so that a dashboard and a notification cannot disagree.
"""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.beside import CHECKPOINTS, MEMORY, PROCESSES
from rankscope_dashboards.comparison import COMPARISON
from rankscope_dashboards.dashboard import Dashboard, Row, label_values, other_run
from rankscope_dashboards.panels import BAD, WELL, Query, bars, shares, value
from rankscope_dashboards.phases import CAUSES, PHASES
from rankscope_dashboards.ranks import NOW
from rankscope_dashboards.selectors import RANKS, RUN_ONLY, average, decided, or_nothing_fires
from rankscope_dashboards.state import STATE
from rankscope_dashboards.tables import Column, table_of
from rankscope_dashboards.thresholds import LOSS_LIMIT
from rankscope_dashboards.throughput import GPUS, HOW_FAST, STEPS
from rankscope_dashboards.waiting import COLLECTIVES, LAG

FIRING = f'ALERTS{{alertstate="firing",{RUN_ONLY}}}'
FINDING = f"run:rankscope_finding:ratio{{{RUN_ONLY}"
NOT_USEFUL = ',cause!="none"'
IN_TURN = '"rank", "after rank", "", ""'
# One or several ranks, or all in turn.
LAGGING = decided(
    f'{FINDING},kind="straggler"}} or on () label_replace({FINDING},kind="rotating_straggler"}}, {IN_TURN})',
    f"rank:rankscope_culprit:ratio{{{RUN_ONLY}}} or on () label_replace("
    f"run:rankscope_rotating:ratio{{{RUN_ONLY}}} * on (run, owner) group_left (cause) run:rankscope_rotating:cause,"
    f" {IN_TURN})",
)
NAMED = f'label_join(label_replace({LAGGING}, "prefix", "rank", "", ""), "who", " ", "prefix", "rank", "cause")'
WHO = f"max by (who) ({NAMED})"
LARGEST_LAG = decided(f"rankscope_rank_lag_ratio{{{RUN_ONLY}}}", f"run:rankscope_lag:max{{{RUN_ONLY}}}")
NOBODY = f'label_replace(max({LARGEST_LAG}) < {LOSS_LIMIT}, "who", "nobody", "", "")'
PHASE_RATIO = f"rank:rankscope_phase:ratio{{{RANKS}}}"


def lost(more: str = "") -> str:
    """The run's GPU time by cause, as ratios; `more` are further matchers."""
    selected = f"{RUN_ONLY}{more}"
    by_exporter = f"max by (run, owner, cause) (rankscope_run_lost_ratio{{{selected}}})"
    return decided(by_exporter, f"run:rankscope_lost:ratio{{{selected}}}")


VARIABLES = (
    # The names that we and Slurm make up end in a time or a count: the newest run comes first.
    label_values("run", "rankscope_rank_info", label="Run", description="The training run.", descending=True),
    label_values(
        "owner",
        'rankscope_rank_info{run="$run"}',
        label="Owner",
        description="The uid of whose run it is: two users may name theirs alike.",
    ),
    label_values(
        "rank",
        f"rankscope_rank_info{{{RUN_ONLY}}}",
        label="Rank",
        description="Narrows the panels that show ranks one by one.",
        everything=True,
    ),
    other_run(
        "compare",
        "run",
        label="Compare with",
        description="Another run, beside which the settings, speed and phases are shown.",
    ),
)

AT_A_GLANCE = Row(
    "Is anything wrong, which rank, and why?",
    (
        STATE,
        value(
            "Holds the others up",
            "The rank that waits least for the others, which is the one that they wait for, what it does meanwhile "
            "more than they do, and by how much of each step it lags; or what ranks lose that are late in turn. "
            "`nobody` is followed by the largest lag. Not known while ranks make no steps, where one has no others, "
            "and until a lag has lasted.",
            "percentunit",
            Query(f"{WHO} or on () {NOBODY}", "{{who}}"),
            steps=((0, BAD),),
            colors={"nobody": WELL},
            text=BigValueTextMode.VALUE_AND_NAME,
            none="not known",
            width=4,
        ),
        table_of(
            "Alerts",
            "What fires now for this run.",
            [Query(or_nothing_fires(FIRING, f"run:rankscope_stall:seconds{{{RUN_ONLY}}}"))],
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
            none="no rank of this run is seen alive",
        ),
        value(
            "Ranks alive",
            "Ranks of this run whose process lives, wherever it runs.",
            "none",
            Query(f"sum(max by (rank) (rankscope_rank_up{{{RUN_ONLY}}}))"),
            width=3,
        ),
        value(
            "Time lost",
            "Share of the allocated GPU time that was not spent in computing.",
            "percentunit",
            Query(f"sum({lost(NOT_USEFUL)})"),
            width=3,
        ),
        value(
            "Judged by",
            "The clock by which ranks are compared and time is called lost: the device's where the GPU of every live "
            "rank of a group is measured, because there the host runs ahead and waits for nobody; else the host's. "
            "Both, if groups differ.",
            "none",
            Query(f"group by (clock) (group:rankscope_clock:info{{{RUN_ONLY}}})", "{{clock}}"),
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
            "The ranks' time by phase, averaged over the chosen ones: the GPUs' where it is measured, else the "
            "training threads'; `Judged by` above says which. The phases partition it, so that the stack is full "
            "wherever ranks live. Choose one rank above to see its own.",
            Query(average(PHASE_RATIO, "phase"), "{{phase}}"),
            colors=PHASES,
            width=8,
        ),
        bars(
            "Time by phase, rank by rank",
            "Each rank's time at the end of the time range, by the same clock. Who holds the others up has little red, "
            "and much of something else.",
            Query(f"max by (rank, phase) ({PHASE_RATIO})"),
            bar="rank",
            part="phase",
            colors=PHASES,
            width=8,
            none="no rank lives",
        ),
        shares(
            "Time lost by cause",
            "The allocated GPU time by what it went into; green is computing. `straggler` is waiting for a rank that "
            "comes late, `transfer` what even the least waiter waits; `stall` is all of a run that stands still, "
            "`idle` the GPUs of ranks that have ended.",
            Query(lost(), "{{cause}}"),
            colors=CAUSES,
            width=8,
        ),
    ),
)

RUN = Dashboard(
    uid="rankscope-run",
    title="Run",
    description="One training run: what holds it back, which rank and why, and what another choice would bring.",
    variables=VARIABLES,
    rows=(
        AT_A_GLANCE,
        HOW_FAST,
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
