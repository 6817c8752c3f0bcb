"""The dashboard *Run*: which rank holds the others up and why, where the time goes, and what each rank does now.

Judgements (lag, cause, time lost, alerts) come from the recording rules and never from panels, so that a dashboard
and a notification cannot disagree.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.dashboard import Dashboard, Row, label_values
from rankscope_dashboards.panels import BAD, GOOD, NEUTRAL, Query, bars, lines, shares, value
from rankscope_dashboards.ranks import COLLECTIVES, NOW, RANK, RANKS, STEPS, average
from rankscope_dashboards.tables import Column, table_of

THRESHOLDS = Path(__file__).parents[2] / "deploy/prometheus/thresholds.yml"
LAG_LIMIT = yaml.safe_load(THRESHOLDS.read_text(encoding="utf-8"))["lag_limit"]["production"]

RUN_ONLY = 'run="$run"'
FIRING = f'ALERTS{{alertstate="firing",{RUN_ONLY}}}'

# Computing is green; waiting for others red; what keeps a rank from computing in the colours between.
PHASES = {
    "forward": "semi-dark-green",
    "backward": "dark-green",
    "optimizer": "light-green",
    "collective_wait": "semi-dark-red",
    "data_wait": "semi-dark-orange",
    "h2d_copy": "light-yellow",
    "other": "semi-dark-yellow",
    "checkpoint": "semi-dark-purple",
    "evaluation": "semi-dark-blue",
    "startup": NEUTRAL,
}
CAUSES = PHASES | {
    "none": "semi-dark-green",
    "throttling": "light-green",
    "straggler": "semi-dark-red",
    "transfer": "light-red",
    "stall": "dark-red",
    "data": "semi-dark-orange",
    "data_cpu": "dark-orange",
    "data_io": "light-orange",
    "copies": "light-yellow",
    "idle": "dark-blue",
}

PHASE_RATE = f"rate(rankscope_rank_phase_seconds_total{{{RANKS}}}[$__rate_interval])"

VARIABLES = (
    # The names that we and Slurm make up end in a time or a count: the newest run comes first.
    label_values("run", "rankscope_rank_info", label="Run", description="The training run.", descending=True),
    label_values(
        "rank",
        'rankscope_rank_info{run="$run"}',
        label="Rank",
        description="Narrows the panels that show ranks one by one.",
        everything=True,
    ),
)

AT_A_GLANCE = Row(
    "Is anything wrong, which rank, and why?",
    (
        value(
            "Holds the others up",
            "The rank that waits least for the others, which is the one that they wait for, and what it does meanwhile "
            "more than they do. Empty while no rank lags.",
            "percentunit",
            Query(f"rank:rankscope_culprit:ratio{{{RUN_ONLY}}}", "rank {{rank}}: {{cause}}", needs_fault=True),
            steps=((None, GOOD), (0, BAD)),
            text=BigValueTextMode.VALUE_AND_NAME,
            none="nobody",
            width=5,
        ),
        table_of(
            "Alerts",
            "What fires now for this run.",
            [Query(FIRING, needs_fault=True)],
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
            width=10,
            height=5,
            none="nothing fires",
        ),
        value(
            "Ranks alive",
            "Ranks of this run whose process lives, wherever it runs.",
            "none",
            Query(f"sum(max by (rank) (rankscope_rank_up{{{RUN_ONLY}}}))"),
            width=3,
        ),
        value(
            "Last progress",
            "Time since a probe saw any live rank do anything.",
            "s",
            Query(f"min(rank:rankscope_stall:seconds{{{RUN_ONLY}}})"),
            width=3,
        ),
        value(
            "Time lost",
            "Share of the allocated GPU time that was not spent in computing.",
            "percentunit",
            Query(f'sum(run:rankscope_lost:ratio{{{RUN_ONLY},cause!="none"}})'),
            width=3,
            instant=False,
        ),
    ),
)

LAG = Row(
    "Who holds the others up",
    (
        lines(
            "Lag by rank",
            "How much less a rank waits than the others of its group, as a share of the step. In synchronous training "
            "every rank has the same step time; who waits least is whom the others wait for. Whoever stays above the "
            "dashed line is notified about.",
            "percentunit",
            Query(f"rank:rankscope_lag:ratio{{{RANKS}}}", RANK),
            min_val=None,
            limit=LAG_LIMIT,
            width=8,
        ),
        lines(
            "Waiting by rank",
            "Share of its time that each rank waits in collectives. The lowest line is the culprit's; what even that "
            "one waits is the transfer itself.",
            "percentunit",
            Query(f"rank:rankscope_wait:ratio{{{RANKS}}}", RANK),
            width=8,
        ),
        lines(
            "Excess by phase",
            "How much more of its time a rank that lags spends in a phase than the others of its group; the largest "
            "are shown. The largest excess of a rank that lags is the cause.",
            "percentunit",
            Query(f"topk(8, rank:rankscope_phase_excess:ratio{{{RANKS}}})", f"{RANK} {{{{phase}}}}", needs_fault=True),
            width=8,
        ),
    ),
)

TIME = Row(
    "Where the time goes",
    (
        shares(
            "Time by phase",
            "The training threads' time by phase, averaged over the chosen ranks. The phases partition it, so that the "
            "stack is full wherever ranks live. Choose one rank above to see its own.",
            Query(average(PHASE_RATE, "phase"), "{{phase}}"),
            colors=PHASES,
        ),
        bars(
            "Time by phase, rank by rank",
            "Each rank's time at the end of the time range. Who holds the others up has little red, and much of "
            "something else.",
            Query(f"max by (rank, phase) ({PHASE_RATE})"),
            bar="rank",
            part="phase",
            colors=PHASES,
        ),
        shares(
            "Time lost by cause",
            "The allocated GPU time by what it went into; green is computing. `straggler` is waiting for a rank that "
            "comes late, `transfer` what even the least waiter waits; `stall` is all of a run that stands still, "
            "`idle` the GPUs of ranks that have ended.",
            Query(f"run:rankscope_lost:ratio{{{RUN_ONLY}}}", "{{cause}}"),
            colors=CAUSES,
        ),
        lines(
            "GPU busy by rank",
            "Share of the time in which a kernel was running on the rank's GPU. A kernel that waits for other ranks "
            "counts as busy.",
            "percentunit",
            Query(
                "max by (rank) (gpu:rankscope_busy:ratio"
                f" * on (job, instance, uuid) group_right () rank:rankscope_rank_info:live{{{RANKS}}})",
                RANK,
            ),
            max_val=1,
        ),
    ),
)

RUN = Dashboard(
    uid="rankscope-run",
    title="Run",
    description="One training run: which rank holds the others up and why, and where the time goes.",
    variables=VARIABLES,
    rows=(AT_A_GLANCE, LAG, TIME, STEPS, COLLECTIVES, NOW),
    alerts=FIRING,
)
