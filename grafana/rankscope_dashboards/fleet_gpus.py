"""The rows of the dashboard *Fleet* about all nodes and GPUs: their states, sick ones, and idle ones by user."""

from __future__ import annotations

from dataclasses import replace

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.fleet_runs import NODES
from rankscope_dashboards.links import TO_NODE
from rankscope_dashboards.panels import NORMAL, Query, shares
from rankscope_dashboards.selectors import EXPORTER, age
from rankscope_dashboards.tables import Column, or_words, table_of
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.report.colors import BAD, CAUTION, STATE_COLORS
from rankscope_exporter.report.gpus import CULPRIT_RUNS

SHOWN = 100
"""The most lines of a table."""
UP = {
    "up": ("up", NORMAL),
    "down": ("down", BAD),
    "no driver": ("no driver", CAUTION),
    "none seen": ("none seen", NORMAL),
}
COUNT, LONGER_COUNT = 68, 80
"""Pixels of a column with a number of GPUs, with a short or a longer heading."""
GPU = "instance, gpu, uuid"
IDLE = "allocated_no_process|process_no_work|memory_held_by_dead"
# Nodes that an exporter has shown in the last hour and none shows now; or a target that is down, in a job of exporters.
NOT_SHOWN = (
    "group by (instance, node) (last_over_time(rankscope_exporter_ranks_alive[1h])"
    " unless on (job, instance) up == 1 unless on (node, cluster) rankscope_exporter_ranks_alive)"
)
DOWN_TARGETS = (
    "group by (instance) (up == 0 and on (job) rankscope_exporter_build_info"
    " unless on (job) (up == 1 unless on (job, instance) rankscope_exporter_build_info))"
)
DOWN = f"({NOT_SHOWN} or on (instance) {DOWN_TARGETS})"
LOST = (
    "(max by (instance) (rankscope_exporter_gpus_expected) - max by (instance) (rankscope_exporter_gpus_seen) > 0"
    " unless on (instance) rankscope_exporter_gpus_released == 1)"
)


def gpus_in(state: str) -> str:
    """Return the query of the number of GPUs in these states, by exporter."""
    return f'count by (instance) (max by ({GPU}) (rankscope_gpu_state_info{{state=~"{state}"}}))'


# A lost GPU is worse than any other, and an exporter that is down hides all of them.
BADNESS = f"(100 * {LOST} or on (instance) {gpus_in('suspected_hang|unknown')} or on (instance) 0.1 * {gpus_in(IDLE)})"
NO_DRIVER = "max by (instance) (rankscope_exporter_nvml_up) == 0"
KEYS = (
    f'label_replace(1000 * {DOWN}, "exporter", "down", "", "") or on (instance)'
    f' label_replace({NODES} * on (instance) group_left () ({NO_DRIVER}) + 500, "exporter", "no driver", "", "")'
    " or on (instance)"
    f' label_replace({NODES} * 0 + on (instance) group_left () {BADNESS} or {NODES} * 0, "exporter", "up", "", "")'
)
NODES_SHOWN = f"topk({SHOWN}, {KEYS})"


def shown(vector: str) -> str:
    """Return the query of the nodes of `vector` that the table shows."""
    return f"{vector} and on (instance) {NODES_SHOWN}"


def column(source: str, title: str, state: str) -> Column:
    """Return the column of the number of GPUs in a state."""
    width = COUNT if len(title) < len("Working") else LONGER_COUNT
    return Column(source, title, steps=((None, NORMAL), (1, STATE_COLORS[state])), is_filled=True, width=width)


MAP = Row(
    "All nodes and GPUs",
    (
        table_of(
            "GPUs by node and state, the worst first",
            "How many GPUs of each node are in each state. `Idle`: allocated or with a process, and no kernel runs. "
            "`Held`: a process that has ended holds memory. `Hang`: kernels run, but no rank makes progress. `Lost`: "
            "the driver has reported the GPU since the exporter started, and it does not answer. Nothing is known "
            "about the GPUs of an exporter that is down or has no driver: its cells are empty. "
            f"At most {SHOWN} nodes.",
            [
                Query(or_words(NODES_SHOWN, "exporter", "none seen")),
                Query(shown(gpus_in("working"))),
                Query(shown(gpus_in("free"))),
                Query(shown(gpus_in("allocated_no_process|process_no_work")), needs_fault=True),
                Query(shown(gpus_in("memory_held_by_dead")), needs_fault=True),
                Query(shown(gpus_in("suspected_hang")), needs_fault=True),
                Query(shown(gpus_in("unknown")), needs_fault=True),
                Query(shown(LOST), needs_fault=True),
            ],
            [
                Column("node", "Node", filterable=True, link=TO_NODE),
                Column("exporter", "Exporter", names=UP, width=76),
                Column("H", "Lost", steps=((None, NORMAL), (1, BAD)), is_filled=True, width=COUNT),
                column("F", "Hang", "suspected_hang"),
                column("E", "Held", "memory_held_by_dead"),
                column("D", "Idle", "process_no_work"),
                column("B", "Working", "working"),
                column("C", "Free", "free"),
                column("G", "Unknown", "unknown"),
                Column("instance", "Instance", hidden=True),
            ],
            width=19,
            height=9,
            empty="no exporter has shown a node in the last hour",
            sort="A",
        ),
        replace(
            shares(
                "GPUs by state",
                "The share of all GPUs in each state. GPUs that are lost, and those of exporters that are down, are "
                "not included.",
                Query(
                    f"count by (state) (max by ({GPU}, state) (rankscope_gpu_state_info)) / on () group_left ()"
                    " count(rankscope_gpu_state_info)",
                    "{{state}}",
                ),
                colors=STATE_COLORS,
                width=5,
                empty="no exporter shows the state of a GPU",
            ),
            height=9,
            points=120,
        ),
    ),
)

# Not the reasons of a healthy GPU: at its power limit, or with a GPU that is throttled.
REASONS = 'reason!~"sync_boost|sw_power_cap"'
# The rate is extrapolated to the interval, so it may exceed 1.
THROTTLED = (
    f"clamp_max(max by ({GPU}, reason) (rate(rankscope_gpu_throttled_seconds_total{{{REASONS}}}[$__rate_interval])), 1)"
    f" > {Thresholds().throttled}"
)
XIDS = f"min by ({GPU}, xid) ({age('rankscope_gpu_xid_last_timestamp_seconds')}) < 3600"
ERRORS = 'max by (instance, gpu, uuid, location) (rankscope_gpu_ecc_errors_total{kind="uncorrected"})'
ECC = f"sum by ({GPU}) ({ERRORS}) > 0"
# Those that its exporter counts, and those that the analyzer does, which span nodes.
CULPRITS = (
    "sum by (uuid) (max by (instance, uuid) (rankscope_gpu_culprit_runs))"
    f" * on (uuid) group_right () max by ({GPU}) (rankscope_gpu_info) >= {CULPRIT_RUNS}"
)


def fault(vector: str, text: str, label: str = "") -> str:
    """Return the query of sick GPUs with the text of their fault; `$1` in it is the value of the label."""
    return f'label_replace({vector}, "fault", "{text}", "{label}", "(.*)")'


def on_node(vector: str) -> str:
    """Return the query of GPUs with their node, if it is known; at most as many as a table shows."""
    return f"topk({SHOWN}, ({vector}) * on (instance) group_left (node) {NODES})"


LOST_GPUS = " or on (instance) ".join(
    (
        fault(f"max by ({GPU}) (rankscope_gpu_up == 0)", "lost: it does not answer"),
        fault(LOST, "lost: the driver does not reach it"),
    )
)
DAMAGED = " or ".join(
    (
        fault(f"max by ({GPU}) (rankscope_gpu_row_remapping_failed == 1)", "a row could not be remapped"),
        fault(f"max by ({GPU}) (rankscope_gpu_row_remapping_pending == 1)", "row remapping waits for a reset"),
        fault(f"max by ({GPU}) (rankscope_gpu_page_retirement_pending == 1)", "page retirement waits for a reset"),
    )
)
SICK = {
    "lost": f"({LOST_GPUS} or {DAMAGED})",
    "xid": fault(XIDS, "XID $1", "xid"),
    "ecc": fault(ECC, "uncorrected memory errors"),
    "throttled": fault(THROTTLED, "throttled: $1", "reason"),
    "culprit": fault(CULPRITS, "culprit in several runs of the last week"),
}
ALL_SICK = f"group by ({GPU}, fault) ({' or '.join(SICK.values())})"
SICK_GPUS = f"group by (instance, gpu) ({ALL_SICK})"

HOLDER = f"{EXPORTER}, uuid"
# There is one series of each kind for a GPU.
IDLE_GPUS = (
    f'(rankscope_gpu_state_info{{state=~"{IDLE}"}} * on ({HOLDER}) group_left (user, k8s_namespace)'
    f' rankscope_gpu_allocation_info or rankscope_gpu_state_info{{state=~"{IDLE}"}}'
    f" unless on ({HOLDER}) rankscope_gpu_allocation_info)"
)
IDLE_FOR = f"({age('rankscope_gpu_last_busy_timestamp_seconds')} * on ({HOLDER}) group_right () {IDLE_GPUS})"
BY_HOLDER = "by (user, k8s_namespace, state)"
NO_IDLE = "no GPU is held and idle"
IDLE_STATES = {state: (state.replace("_", " "), STATE_COLORS[state]) for state in IDLE.split("|")} | {
    NO_IDLE: (NO_IDLE, NORMAL)
}

TROUBLE = Row(
    "Sick and idle GPUs",
    (
        table_of(
            "Sick GPUs",
            "GPUs that are lost, had an XID error in the last hour, have memory errors or rows that could not be "
            f"replaced, are throttled for more than {Thresholds().throttled:.0%} of the time (the power limit alone "
            f"does not count), or were the culprit in {CULPRIT_RUNS:g} runs of the last week.",
            [
                Query(or_words(on_node(ALL_SICK), "fault", "no exporter shows a sick GPU"), needs_fault=True),
                Query(on_node(SICK["xid"]), needs_fault=True),
                Query(on_node(SICK["ecc"]), needs_fault=True),
                Query(on_node(SICK["throttled"]), needs_fault=True),
            ],
            [
                Column("node", "Node", filterable=True, link=TO_NODE, width=90),
                Column("gpu", "GPU", width=50),
                Column("fault", "Fault", filterable=True, wrap=True),
                Column("B", "XID ago", "s", width=82, decimals=1),
                Column("C", "Errors", width=64),
                Column("D", "Throttled", "percentunit", width=80),
                Column("instance", "Instance", hidden=True),
            ],
            width=14,
            height=9,
            empty="no exporter shows a sick GPU",
        ),
        table_of(
            "Idle GPUs by user and namespace",
            "GPUs that are allocated or have a process, and run no kernel. The user and the namespace are empty if "
            "the exporter does not know the holder.",
            [
                Query(
                    or_words(f"topk({SHOWN}, count {BY_HOLDER} ({IDLE_GPUS}))", "state", NO_IDLE),
                    needs_fault=True,
                ),
                Query(f"topk({SHOWN}, max {BY_HOLDER} ({IDLE_FOR}))", needs_fault=True),
            ],
            [
                Column("state", "State", filterable=True, names=IDLE_STATES),
                Column("user", "User", filterable=True, width=80),
                Column("k8s_namespace", "Namespace", width=96),
                Column("A", "GPUs", width=52),
                Column("B", "Longest idle", "s", width=80, decimals=1),
            ],
            width=10,
            height=9,
            empty=NO_IDLE,
            sort="A",
        ),
    ),
)
