"""The dashboard *Node*: one exporter's GPUs (whose, busy or idle, memory, power, throttling, errors), and itself."""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.dashboard import Dashboard, Row, label_values
from rankscope_dashboards.hardware import NETWORK, POWER, TROUBLE
from rankscope_dashboards.holders import HOLDERS, RANKS
from rankscope_dashboards.panels import BAD, CAUTION, WELL, Query, lines, value
from rankscope_dashboards.selectors import GPU, HERE, or_nothing_fires
from rankscope_dashboards.tables import Column, table_of
from rankscope_dashboards.thresholds import THROTTLED_SHARE

# Alerts about a GPU or its rank name the GPU and not always the exporter. Others may be about the same instance.
FIRING = (
    f'ALERTS{{alertstate="firing",alertname=~"Rankscope.+",{HERE}}}'
    f' or (ALERTS{{alertstate="firing"}} and on (uuid) rankscope_gpu_info{{{HERE}}})'
)
# A target that does not answer shows nothing but `up`, and others may have the same instance.
EXPORTERS = f"last_over_time(rankscope_exporter_build_info{{{HERE}}}[$__range])"
REAL_REASON = 'reason!="sync_boost"'  # which is other GPUs' throttling
WHAT_IT_IS = "gpu, uuid, name, pci_bus_id, driver_version, busy_source"
UP = {1: ("up", WELL), 0: ("down", BAD)}

VARIABLES = (
    label_values(
        "instance",
        "rankscope_exporter_build_info",
        label="Instance",
        description="The exporter; each node has one.",
    ),
)

AT_A_GLANCE = Row(
    "Is anything wrong?",
    (
        value(
            "Exporter",
            "Whether Prometheus reaches it.",
            "none",
            Query(f"max(up{{{HERE}}} and on (job, instance) {EXPORTERS})"),
            names=UP,
            width=2,
        ),
        value(
            "Driver",
            "Whether the NVIDIA driver answers the exporter.",
            "none",
            Query(f"rankscope_exporter_nvml_up{{{HERE}}}"),
            names=UP,
            width=2,
        ),
        value(
            "Lost GPUs",
            "GPUs that the driver has reported since the exporter started and that do not answer now.",
            "none",
            Query(f"rankscope_exporter_gpus_expected{{{HERE}}} - rankscope_exporter_gpus_seen{{{HERE}}}"),
            steps=((0, WELL), (1, BAD)),
            width=2,
        ),
        value(
            "Handles",
            "Whether the exporter has given the GPUs back on request (`POST /-/release`), for a reset or another "
            "driver. Then all that is said of GPUs is absent.",
            "none",
            Query(f"rankscope_exporter_gpus_released{{{HERE}}}"),
            names={0: ("held", WELL), 1: ("released", CAUTION)},
            width=2,
        ),
        value(
            "Throttled",
            "Of all GPUs the one whose clocks are held down for most of the time. The row below says for what reason.",
            "percentunit",
            Query(
                f"topk(1, max by (gpu) (rate(rankscope_gpu_throttled_seconds_total{{{HERE},{REAL_REASON}}}"
                "[$__rate_interval])))",
                GPU,
            ),
            steps=((0, WELL), (THROTTLED_SHARE, CAUTION)),
            text=BigValueTextMode.VALUE_AND_NAME,
            width=2,
        ),
        value(
            "Hottest",
            "Of all GPUs the one with the highest core temperature. How much it may have differs between models.",
            "celsius",
            Query(f"topk(1, rankscope_gpu_temperature_celsius{{{HERE}}})", GPU),
            text=BigValueTextMode.VALUE_AND_NAME,
            width=2,
        ),
        value(
            "XID errors",
            "Errors of all GPUs that the driver has reported since the exporter started.",
            "none",
            Query(f"sum(rankscope_gpu_xid_errors_total{{{HERE}}})"),
            steps=((0, WELL), (1, CAUTION)),
            width=2,
        ),
        value(
            "Most idle",
            "The GPU in which no kernel has run for the longest time.",
            "s",
            Query(f"max(gpu:rankscope_idle:seconds{{{HERE}}})"),
            width=2,
        ),
        table_of(
            "Alerts",
            "What fires now for this exporter, its GPUs and the ranks on them.",
            [Query(or_nothing_fires(FIRING, f"rankscope_exporter_build_info{{{HERE}}}"))],
            [
                Column("alertname", "Alert"),
                Column("severity", "Severity"),
                Column("gpu", "GPU"),
                Column("run", "Run"),
                Column("rank", "Rank"),
            ],
            width=8,
            height=5,
            none="the exporter does not answer",
        ),
    ),
)

GPUS = Row(
    "GPUs",
    (
        table_of(
            "GPUs",
            "Every GPU: what it is and what it does now. A lost one does not answer and has no values.",
            [
                Query(f"max by ({WHAT_IT_IS}) (rankscope_gpu_info{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_up{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (gpu:rankscope_busy:ratio{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (gpu:rankscope_idle:seconds{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_memory_used_bytes{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_memory_total_bytes{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_processes{{{HERE}}})"),
            ],
            [
                Column("gpu", "GPU"),
                Column("B", "Answers", names={1: ("yes", WELL), 0: ("no", BAD)}),
                Column("C", "Busy", "percentunit", bar=True),
                Column("D", "Idle for", "s"),
                Column("E", "Memory used", "bytes"),
                Column("F", "Memory", "bytes"),
                Column("G", "Processes"),
                Column("name", "Model"),
                Column("uuid", "UUID"),
                Column("pci_bus_id", "PCI bus id"),
                Column("driver_version", "Driver"),
                Column("busy_source", "Busy time from"),
            ],
        ),
        lines(
            "Busy",
            "Share of the time in which a kernel was running: the true average over each step of the graph, as the "
            "exporter integrates the driver's samples. A kernel that waits for other ranks counts as busy.",
            "percentunit",
            Query(f"rate(rankscope_gpu_busy_seconds_total{{{HERE}}}[$__rate_interval])", GPU),
            max_val=1,
        ),
        lines(
            "Idle for",
            "Time since a kernel was last seen running.",
            "s",
            Query(f"gpu:rankscope_idle:seconds{{{HERE}}}", GPU),
        ),
        lines(
            "Memory used",
            "Memory that processes have allocated, without what the driver reserves; dashed: what a GPU has.",
            "bytes",
            Query(f"rankscope_gpu_memory_used_bytes{{{HERE}}}", GPU),
            Query(f"max(rankscope_gpu_memory_total_bytes{{{HERE}}})", "total"),
            dashed="total",
        ),
        lines(
            "Processes",
            "Processes with a context on the GPU. More than one a rank is somebody else's, or a leftover.",
            "none",
            Query(f"rankscope_gpu_processes{{{HERE}}}", GPU),
        ),
    ),
)

EXPORTER = Row(
    "Exporter",
    (
        table_of(
            "Collectors",
            "Each source of metrics: whether it worked in the last scrape, and how long it took.",
            [
                Query(f"max by (collector) (rankscope_exporter_collector_success{{{HERE}}})"),
                Query(f"max by (collector) (rankscope_exporter_collector_duration_seconds{{{HERE}}})"),
            ],
            [
                Column("collector", "Collector"),
                Column("A", "Worked", names={1: ("yes", WELL), 0: ("no", BAD)}),
                Column("B", "Took", "s"),
            ],
            width=8,
        ),
        lines(
            "Files not shown as ranks",
            "Files in the run directories, by the reason that they are not shown: no readable record (`truncated`, "
            "`foreign`, `version`, `symlink`, `unreadable`), another user's record of the same run and rank is shown "
            "(`duplicate`), or there are more than the exporter takes (`too_many_files`, `too_many_ranks`, "
            "`too_many_names`). A rank that is missing from its run may be one of them.",
            "none",
            Query(f"rankscope_exporter_rank_files_skipped{{{HERE}}}", "{{reason}}"),
            width=8,
        ),
        table_of(
            "Build",
            "The exporter's version.",
            [Query(f"max by (version, python_version) (rankscope_exporter_build_info{{{HERE}}})")],
            [Column("version", "Version"), Column("python_version", "Python")],
            width=8,
        ),
    ),
)

NODE = Dashboard(
    uid="rankscope-node",
    title="Node",
    description="One node's GPUs: whose, busy or idle, memory, power, throttling and errors; and the exporter itself.",
    variables=VARIABLES,
    rows=(AT_A_GLANCE, HOLDERS, GPUS, POWER, TROUBLE, NETWORK, RANKS, EXPORTER),
    alerts=FIRING,
)
