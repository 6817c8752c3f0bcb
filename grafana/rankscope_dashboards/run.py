"""The dashboard *Run*: what slows down a training run. Details are in collapsed rows.

Results of the diagnosis (findings, lag, lost time) come from the exporter or the analyzer that diagnoses the run. No
panel computes its own, so that dashboard and notification agree.
"""

from __future__ import annotations

from rankscope_dashboards.by_rank import LAG_TIMELINE
from rankscope_dashboards.comparison import PHASES_OF_RUNS, SETTINGS_OF_RUNS, SPEED_OF_RUNS
from rankscope_dashboards.dashboard import Dashboard, Mark, Row, label_values, other_run
from rankscope_dashboards.findings import findings_table, firing
from rankscope_dashboards.links import RUN_UID
from rankscope_dashboards.panels import Query, bars, shares
from rankscope_dashboards.phases import PHASE_RATIOS, TIME_BY_PHASE, WAITS
from rankscope_dashboards.ranks import NOW
from rankscope_dashboards.resources import HOSTS
from rankscope_dashboards.selectors import NAMED_RANKS, RUN_ONLY, live
from rankscope_dashboards.throughput import GPUS, STEP_TIMES, TILES
from rankscope_dashboards.verdict import VERDICT
from rankscope_dashboards.waiting import WAITING
from rankscope_exporter.report.colors import CAUSE_COLORS, NEUTRAL, PHASE_COLORS

FIRING = f'ALERTS{{alertstate="firing",{RUN_ONLY}}}'
OF_GPUS = firing('uuid!="",run=""')
ALERTS = f"{firing(RUN_ONLY)} or ({OF_GPUS} and on (uuid) rankscope_rank_info{{{RUN_ONLY}}})"
"""The alerts about the run, and about the GPUs of its ranks."""
_STARTS = live(f"rankscope_rank_start_timestamp_seconds{{{RUN_ONLY}}}")
STARTED = f"1000 * min by (run, owner) ({_STARTS})"
"""The time of the last start, in milliseconds."""
FIRST_START = f"min_over_time(({STARTED})[$__range:1m] @ end())"

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

_EXIT = (
    f"1000 * min by (run, owner, reason) (rankscope_rank_exit_timestamp_seconds{{{RUN_ONLY}}}"
    f" * ignoring (reason) group_right () rankscope_rank_exit_info{{{RUN_ONLY}}})"
)
MARKS = (
    Mark(
        "Starts and ends",
        f'label_replace({STARTED} == {FIRST_START}, "event", "start", "", "")'
        f' or label_replace({STARTED} > {FIRST_START}, "event", "restart", "", "")'
        f' or label_replace({_EXIT}, "event", "end", "", "")',
        NEUTRAL,
        "{{event}} {{reason}}",
    ),
    Mark(
        "Checkpoints",
        f"1000 * max by (run, owner) (rankscope_rank_checkpoint_last_timestamp_seconds{{{RUN_ONLY}}})",
        PHASE_COLORS["checkpoint"],
    ),
)

OVERVIEW = Row(
    "Is anything wrong? Which rank, and why?",
    (
        VERDICT,
        findings_table(f"rankscope_finding_info{{{RUN_ONLY}}}", ALERTS),
        *TILES,
    ),
)

LEGEND_HEIGHT = 9
"""Of a panel with the names of all phases or causes."""
TIME = Row(
    "Where does the time go?",
    (
        shares(
            "Time by phase",
            "The ranks' time by phase, averaged over the chosen ranks: GPU time if it is measured, otherwise time of "
            "the training threads. Blue is computing, orange is waiting for other ranks. Choose a rank "
            "above to see only its time.",
            Query(TIME_BY_PHASE, "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
            height=LEGEND_HEIGHT,
            points=40,
        ),
        bars(
            "Time by phase and rank",
            "Each rank's time at the end of the time range, by the same clock. A straggler has little orange, and more "
            f"of another color. At most {NAMED_RANKS} ranks, those that wait least.",
            Query(f"{PHASE_RATIOS} > 0 and on (rank) bottomk({NAMED_RANKS}, {WAITS})"),
            bar="rank",
            part="phase",
            colors=PHASE_COLORS,
            width=8,
            height=LEGEND_HEIGHT,
            empty="no live ranks",
        ),
        shares(
            "Lost time by cause",
            "The allocated GPU time by cause; blue is computing. `straggler`: waiting for a late rank. `transfer`: "
            "the wait of the rank that waits least. `stall`: all time of a run that hangs. `idle`: GPUs of ranks that "
            "have ended.",
            Query(f"max by (cause) (rankscope_run_lost_ratio{{{RUN_ONLY}}})", "{{cause}}"),
            colors=CAUSE_COLORS,
            width=8,
            height=LEGEND_HEIGHT,
            empty="no exporter or analyzer diagnoses the run",
        ),
    ),
)

LAG = Row("Which rank lags, and since when?", (LAG_TIMELINE,))

COMPARISON = Row(
    "Settings and speed (to compare, choose another run above)",
    (SETTINGS_OF_RUNS, SPEED_OF_RUNS, STEP_TIMES, PHASES_OF_RUNS),
    collapsed=True,
)

RUN = Dashboard(
    uid=RUN_UID,
    title="Run",
    description="One training run: what slows it down, which rank, and why; and a comparison with another run.",
    variables=VARIABLES,
    rows=(OVERVIEW, TIME, LAG, NOW, WAITING, GPUS, HOSTS, COMPARISON),
    alerts=FIRING,
    marks=MARKS,
)
