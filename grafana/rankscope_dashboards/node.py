"""The dashboard *Node*: one exporter and its GPUs: allocation, utilization, memory, power, throttling, errors."""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.allocation import ALLOCATION, RANKS
from rankscope_dashboards.dashboard import Dashboard, Row, label_values
from rankscope_dashboards.hardware import ERRORS, NETWORK, POWER
from rankscope_dashboards.panels import NORMAL, Query, lines, value
from rankscope_dashboards.selectors import GPU, HERE, age, or_no_alerts
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.report.colors import BAD, CAUTION

# Some alerts about a GPU or a rank have the GPU's label, but not the exporter's.
FIRING = (
    f'ALERTS{{alertstate="firing",alertname=~"Rankscope.+",{HERE}}}'
    f' or (ALERTS{{alertstate="firing"}} and on (uuid) rankscope_gpu_info{{{HERE}}})'
)
# A target that is down has only the series `up`, and other jobs may have the same instance.
EXPORTERS = f"last_over_time(rankscope_exporter_build_info{{{HERE}}}[$__range])"
IDLE = age(f"rankscope_gpu_last_busy_timestamp_seconds{{{HERE}}}")
OWN_REASON = 'reason!="sync_boost"'  # sync_boost: another GPU is throttled
GPU_LABELS = "gpu, uuid, name, pci_bus_id, driver_version, busy_source"
UP = {1: ("up", NORMAL), 0: ("down", BAD)}

VARIABLES = (
    label_values(
        "instance",
        "rankscope_exporter_build_info",
        label="Instance",
        description="The exporter; each node has one.",
    ),
)

OVERVIEW = Row(
    "Is anything wrong?",
    (
        value(
            "Exporter",
            "Whether Prometheus can scrape the exporter.",
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
            steps=((0, NORMAL), (1, BAD)),
            width=2,
        ),
        value(
            "Released",
            "Whether the GPUs are released on request (`POST /-/release`), for a reset or a driver upgrade. Then there "
            "are no metrics of GPUs.",
            "none",
            Query(f"rankscope_exporter_gpus_released{{{HERE}}}"),
            names={0: ("no", NORMAL), 1: ("yes", CAUTION)},
            width=2,
        ),
        value(
            "Throttled",
            "The GPU that is throttled for the largest share of the time. *Throttling and errors* shows the reason.",
            "percentunit",
            Query(
                f"topk(1, max by (gpu) (rate(rankscope_gpu_throttled_seconds_total{{{HERE},{OWN_REASON}}}"
                "[$__rate_interval])))",
                GPU,
            ),
            steps=((0, NORMAL), (Thresholds().throttled, CAUTION)),
            text=BigValueTextMode.VALUE_AND_NAME,
            width=2,
        ),
        value(
            "Hottest",
            "The GPU with the highest core temperature. The limit depends on the model.",
            "celsius",
            Query(f"topk(1, rankscope_gpu_temperature_celsius{{{HERE}}})", GPU),
            text=BigValueTextMode.VALUE_AND_NAME,
            width=2,
        ),
        value(
            "XID errors",
            "Errors of all GPUs since the exporter started.",
            "none",
            Query(f"sum(rankscope_gpu_xid_errors_total{{{HERE}}})"),
            steps=((0, NORMAL), (1, CAUTION)),
            width=2,
        ),
        value(
            "Longest idle",
            "The longest time for which a GPU has run no kernel.",
            "s",
            Query(f"max({IDLE})"),
            width=2,
        ),
        table_of(
            "Alerts",
            "Alerts that fire for this exporter, its GPUs and the ranks on them.",
            [Query(or_no_alerts(FIRING, f"rankscope_exporter_build_info{{{HERE}}}"))],
            [
                Column("alertname", "Alert"),
                Column("severity", "Severity"),
                Column("gpu", "GPU"),
                Column("run", "Run"),
                Column("rank", "Rank"),
            ],
            width=8,
            height=5,
            empty="the exporter does not answer",
        ),
    ),
)

GPUS = Row(
    "GPUs",
    (
        table_of(
            "GPUs",
            "All GPUs: model, utilization and memory. A lost GPU does not answer and has no values.",
            [
                Query(f"max by ({GPU_LABELS}) (rankscope_gpu_info{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_up{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rate(rankscope_gpu_busy_seconds_total{{{HERE}}}[$__rate_interval]))"),
                Query(f"min by (gpu, uuid) ({IDLE})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_memory_used_bytes{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_memory_total_bytes{{{HERE}}})"),
                Query(f"max by (gpu, uuid) (rankscope_gpu_processes{{{HERE}}})"),
            ],
            [
                Column("gpu", "GPU"),
                Column("B", "Up", names={1: ("yes", NORMAL), 0: ("no", BAD)}),
                Column("C", "Busy", "percentunit", bar=True),
                Column("D", "Idle for", "s"),
                Column("E", "Memory used", "bytes"),
                Column("F", "Memory", "bytes"),
                Column("G", "Processes"),
                Column("name", "Model"),
                Column("uuid", "UUID"),
                Column("pci_bus_id", "PCI bus ID"),
                Column("driver_version", "Driver"),
                Column("busy_source", "Source of busy time"),
            ],
        ),
        lines(
            "Busy",
            "Share of the time in which a kernel was running: the exact average over each interval of the graph, as "
            "the exporter integrates the driver's samples. A kernel that waits for other ranks counts as busy.",
            "percentunit",
            Query(f"rate(rankscope_gpu_busy_seconds_total{{{HERE}}}[$__rate_interval])", GPU),
            max_val=1,
        ),
        lines(
            "Idle for",
            "Time since a kernel last ran.",
            "s",
            Query(f"min by (gpu, uuid) ({IDLE})", GPU),
        ),
        lines(
            "Memory used",
            "Memory that processes have allocated, without the driver's reserve. Dashed: total memory of a GPU.",
            "bytes",
            Query(f"rankscope_gpu_memory_used_bytes{{{HERE}}}", GPU),
            Query(f"max(rankscope_gpu_memory_total_bytes{{{HERE}}})", "total"),
            dashed="total",
        ),
        lines(
            "Processes",
            "Processes with a context on the GPU. More processes than ranks: a foreign or leftover process.",
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
            "For each collector, whether it succeeded in the last scrape, and how long it took.",
            [
                Query(f"max by (collector) (rankscope_exporter_collector_success{{{HERE}}})"),
                Query(f"max by (collector) (rankscope_exporter_collector_duration_seconds{{{HERE}}})"),
            ],
            [
                Column("collector", "Collector"),
                Column("A", "Success", names={1: ("yes", NORMAL), 0: ("no", BAD)}),
                Column("B", "Duration", "s"),
            ],
            width=8,
        ),
        lines(
            "Skipped files",
            "Files in the run directories that are not exported as ranks, by reason: no readable record (`truncated`, "
            "`foreign`, `version`, `symlink`, `unreadable`), another user's record of the same run and rank is "
            "exported (`duplicate`), or there are more than the exporter's limits (`too_many_files`, "
            "`too_many_ranks`, `too_many_names`). If a run lacks a rank, look here.",
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
    description="GPUs of one node: allocation, utilization, memory, power, throttling and errors; and the exporter.",
    variables=VARIABLES,
    rows=(OVERVIEW, ALLOCATION, GPUS, POWER, ERRORS, NETWORK, RANKS, EXPORTER),
    alerts=FIRING,
)
