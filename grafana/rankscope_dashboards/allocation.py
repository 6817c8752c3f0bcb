"""The panels of the dashboard *Node* about its GPUs and their states, who uses them, and the ranks on the node."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.hardware import BUSY, MARGIN, TEMPERATURE, THROTTLED_RATIO
from rankscope_dashboards.links import cell, rank_link, run_link
from rankscope_dashboards.panels import NORMAL, Panel, Query, lines, timeline
from rankscope_dashboards.selectors import HERE
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.report.colors import BAD, CAUTION, NEUTRAL, STATE_COLORS
from rankscope_exporter.report.gpus import CULPRIT_RUNS

STATE_NAMES = {state: (state.replace("_", " "), color) for state, color in STATE_COLORS.items()}
HOLDERS = (
    "source, user, slurm_job_id, slurm_job_name, slurm_account, slurm_partition, k8s_namespace, k8s_pod, "
    "k8s_container, container_id"
)
IDENTITY = "gpu, uuid, name, pci_bus_id, driver_version, busy_source"
# A rank of a run has one line, also if it was restarted.
RANK = "{{run}} rank {{rank}}"

# Later ones apply only to GPUs that none before applies to.
LOST, THROTTLED = "does not answer", "throttled"
_ALERTING = f"max by (gpu) ({THROTTLED_RATIO}) > {Thresholds().throttled}"
CODED = {
    LOST: (BAD, f"max by (gpu) (rankscope_gpu_up{{{HERE}}}) == 0"),
    THROTTLED: (
        CAUTION,
        f'({_ALERTING}) and on (gpu) rankscope_gpu_state_info{{{HERE},state=~"working|suspected_hang"}}',
    ),
} | {
    STATE_NAMES[state][0]: (color, f'max by (gpu) (rankscope_gpu_state_info{{{HERE},state="{state}"}})')
    for state, color in STATE_COLORS.items()
}
CODES = {number: (text, color) for number, (text, (color, _)) in enumerate(CODED.items())}
STATE_CODE = " or on (gpu) ".join(f"0 * ({vector}) + {number}" for number, (_, vector) in enumerate(CODED.values()))


def in_order(vector: str) -> str:
    """Return the query with the label `at`, by which texts are sorted as the numbers of the GPUs are."""
    return f'label_replace(label_replace({vector}, "at", "0$1", "gpu", "(.)"), "at", "$1", "gpu", "(..)")'


TIMELINE = timeline(
    "State of each GPU over time",
    "What each GPU is used for, and whether it answers. `working` includes pauses up to a minute. `throttled`: it "
    f"works and is throttled for more than {Thresholds().throttled:.0%} of the time. `allocated no process`: allocated "
    "by a scheduler or a rank, but no process runs on it. `process no work`: a process has a context but runs no "
    "kernels. `memory held by dead`: the process that allocated its memory has ended. `suspected hang`: kernels run, "
    "but no rank makes progress.",
    Query(in_order(STATE_CODE), "GPU {{gpu}}"),
    names=CODES,
    empty="no GPU of this exporter in this time range",
)

GPUS = table_of(
    "GPUs",
    "All GPUs. A lost GPU does not answer and has no values. `To slowdown` is how much warmer it may become until it "
    "slows down, by its own limit. `Culprit`: the runs of the last week in which the GPU was to blame, if the exporter "
    "has a `--state-dir`. A run leads to its dashboard, a rank to its panels.",
    [
        Query(
            in_order(
                f"(max by (gpu, state, run, rank, owner) (rankscope_gpu_state_info{{{HERE}}})"
                f' or label_replace(max by (gpu) (rankscope_gpu_up{{{HERE}}}) == 0, "state", "{LOST}", "", ""))'
            )
        ),
        Query(BUSY),
        Query(TEMPERATURE),
        Query(MARGIN),
        Query(f"max by (gpu) ({THROTTLED_RATIO})"),
        Query(f"max by (gpu) (rankscope_gpu_memory_used_bytes{{{HERE}}} / rankscope_gpu_memory_total_bytes{{{HERE}}})"),
        Query(f"sum by (gpu) (rankscope_gpu_xid_errors_total{{{HERE}}})"),
        Query(f'sum by (gpu) (rankscope_gpu_ecc_errors_total{{{HERE},kind="uncorrected"}})'),
        Query(
            "max by (gpu) (sum by (uuid) (max by (instance, uuid) (rankscope_gpu_culprit_runs))"
            f" * on (uuid) group_right () max by (gpu, uuid) (rankscope_gpu_info{{{HERE}}}))",
            rare=True,
        ),
    ],
    [
        Column("gpu", "GPU", width=50),
        Column("state", "State", names=STATE_NAMES | {LOST: (LOST, BAD)}, width=125),
        Column("run", "Run", link=run_link(cell("Run"), cell("Owner"))),
        Column("rank", "Rank", link=rank_link(cell("Rank"), cell("Run"), cell("Owner")), width=60),
        Column("owner", "Owner", hidden=True),
        Column("at", "Order", hidden=True),
        Column("B", "Busy", "percentunit", width=60),
        Column("C", "Core", "celsius", width=70),
        Column("D", "To slowdown", "celsius", steps=((None, CAUTION), (1, "text")), width=92),
        Column("E", "Throttled", "percentunit", steps=((None, "text"), (Thresholds().throttled, CAUTION)), width=88),
        Column("F", "Memory", "percentunit", width=75),
        Column("G", "XIDs", steps=((None, "text"), (1, CAUTION)), width=60),
        Column("H", "ECC", steps=((None, "text"), (1, CAUTION)), width=50),
        Column("I", "Culprit", steps=((None, "text"), (CULPRIT_RUNS, CAUTION)), width=65),
    ],
    height=11,
    empty="the driver does not answer, or the exporter has no GPU",
    sort="-at",
)

ALLOCATION = Row(
    "Whose are the GPUs?",
    (
        table_of(
            "GPU allocation",
            "The job, pod or user that each GPU is allocated to, if known, and the GPU's model and identity.",
            [
                Query(f"max by ({IDENTITY}) (rankscope_gpu_info{{{HERE}}})"),
                Query(f"max by (gpu, uuid, {HOLDERS}) (rankscope_gpu_allocation_info{{{HERE}}})"),
            ],
            [
                Column("gpu", "GPU", width=60),
                Column("source", "Source"),
                Column("user", "User"),
                Column("slurm_job_id", "Slurm job"),
                Column("slurm_job_name", "Slurm name"),
                Column("slurm_account", "Account"),
                Column("slurm_partition", "Partition"),
                Column("k8s_namespace", "Namespace"),
                Column("k8s_pod", "Pod"),
                Column("k8s_container", "Container"),
                Column("container_id", "Container ID"),
                Column("name", "Model"),
                Column("uuid", "UUID"),
                Column("pci_bus_id", "PCI bus ID"),
                Column("driver_version", "Driver"),
                Column("busy_source", "Source of busy time"),
            ],
            empty="the driver does not answer, or the exporter has no GPU",
        ),
    ),
    collapsed=True,
)


def line_by_rank(title: str, description: str, unit: str, vector: str) -> Panel:
    """Return a graph with a line for each rank of the node."""
    return lines(
        title, description, unit, Query(f"max by (run, owner, rank) ({vector})", RANK), width=8, empty="no ranks"
    )


RANKS = Row(
    "Ranks on this node",
    (
        table_of(
            "Ranks",
            "The ranks with records on this node. A rank leads to its panels on the dashboard *Run*.",
            [
                Query(f"max by (run, owner, rank) (rankscope_rank_up{{{HERE}}})"),
                Query(f"max by (run, owner, rank, pid) (rankscope_rank_info{{{HERE}}})"),
                Query(
                    f"max by (run, owner, rank, gpu) (rankscope_rank_info{{{HERE}}}"
                    f" * on (uuid) group_left (gpu) rankscope_gpu_info{{{HERE}}})"
                ),
                Query(f"max by (run, owner, rank) (rankscope_rank_steps_total{{{HERE}}})"),
            ],
            [
                Column("run", "Run", link=run_link(cell("Run"), cell("Owner"))),
                Column("owner", "Owner"),
                Column("rank", "Rank", link=rank_link(cell("Rank"), cell("Run"), cell("Owner"))),
                Column("A", "Alive", names={1: ("yes", NORMAL), 0: ("no", NEUTRAL)}),
                Column("pid", "PID"),
                Column("gpu", "GPU"),
                Column("D", "Steps"),
            ],
            empty="no ranks",
        ),
        line_by_rank(
            "CPUs used",
            "CPUs used by each rank's process and its loader workers. The node needs enough CPUs for the sum.",
            "suffix: CPUs",
            f"sum without (who) (rate(rankscope_rank_cpu_seconds_total{{{HERE}}}[$__rate_interval]))",
        ),
        line_by_rank(
            "Waiting for CPU time",
            "Share of the time in which the rank's main thread was runnable and had no CPU.",
            "percentunit",
            f"rate(rankscope_rank_run_queue_seconds_total{{{HERE}}}[$__rate_interval])",
        ),
        line_by_rank(
            "Resident memory",
            "Host memory of each rank's process, without its children.",
            "bytes",
            f"rankscope_rank_resident_memory_bytes{{{HERE}}}",
        ),
    ),
    collapsed=True,
)
