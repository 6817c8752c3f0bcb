"""The panels of the dashboard *Node* about temperature, throttling, errors, power, clocks and the network."""

from __future__ import annotations

from grafana_foundation_sdk.models.common import BigValueTextMode

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import NORMAL, Query, by_regexp, fixed_colors, lines, shares, value
from rankscope_dashboards.selectors import GPU, HERE
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.report.colors import CAUTION, STATE_COLORS

TITLE_SIZE = 13  # pixels: on a laptop, the names of GPUs and reasons would be too small
OWN_REASON = 'reason!="sync_boost"'  # sync_boost: another GPU is throttled
BUSY = f"clamp_max(max by (gpu) (rate(rankscope_gpu_busy_seconds_total{{{HERE}}}[$__rate_interval])), 1)"
# The rate is extrapolated to the interval, so it may exceed 1.
THROTTLED_RATIO = (
    f"clamp_max(max by (gpu, reason) (rate(rankscope_gpu_throttled_seconds_total{{{HERE},{OWN_REASON}}}"
    "[$__rate_interval])), 1)"
)
THROTTLED_MOST = f"topk(1, {THROTTLED_RATIO})"
NOT_THROTTLED = f'label_replace(max({THROTTLED_RATIO} == 0), "who", "no GPU", "", "")'
_NAMED = f'label_replace(label_replace({THROTTLED_MOST} > 0, "of", "GPU", "", ""), "by", "by", "", "")'
WHO_IS_THROTTLED = f'label_join({_NAMED}, "who", " ", "of", "gpu", "by", "reason")'

TEMPERATURE = f"max by (gpu) (rankscope_gpu_temperature_celsius{{{HERE}}})"
# To the GPU's own slowdown. Ada and later have the margin, earlier ones the temperature of the limit.
MARGIN = (
    f"(max by (gpu) (rankscope_gpu_temperature_margin_celsius{{{HERE}}}) - on (gpu)"
    f' max by (gpu) (rankscope_gpu_temperature_margin_threshold_celsius{{{HERE},threshold="slowdown"}})'
    f' or max by (gpu) (rankscope_gpu_temperature_threshold_celsius{{{HERE},threshold="slowdown"}})'
    f" - on (gpu) {TEMPERATURE})"
)
LIMIT = f'count_values by (gpu) ("limit", bottomk(1, {MARGIN}) + on (gpu) {TEMPERATURE})'
_LIMITED = f"{TEMPERATURE} * on (gpu) group_left (limit) {LIMIT}"
WITH_LIMIT = f'label_replace({_LIMITED}, "text", ", slows down at $1 °C", "limit", "(.+)")'
_SLOWED = f"{_LIMITED} and on (gpu) ({MARGIN} <= 0)"
SLOWED = f'label_replace({_SLOWED}, "text", ", is slowed down: limit $1 °C", "limit", "(.+)")'
XIDS = f"sum(rankscope_gpu_xid_errors_total{{{HERE}}})"
LAST_XID = f"topk(1, max by (gpu, xid) (rankscope_gpu_xid_last_timestamp_seconds{{{HERE}}}))"
_LAST = f'label_join({XIDS} * on () group_left (xid, gpu) ({LAST_XID} > bool 0), "last", ", GPU ", "xid", "gpu")'
WITH_LAST_XID = f'label_replace({_LAST}, "last", ", last: $1", "last", "(.+)")'
ECC = f'max by (gpu) (sum by (instance, gpu) (rankscope_gpu_ecc_errors_total{{{HERE},kind="uncorrected"}}))'
WITH_ECC_GPU = f'label_replace(topk(1, {ECC} > 0), "place", ", GPU $1", "gpu", "(.+)")'

HOTTEST = value(
    "Hottest GPU",
    "The GPU that is closest to its own limit, at which it slows down, with its temperature. Without a known limit, "
    "the GPU with the highest temperature.",
    "celsius",
    Query(f"{SLOWED} or on () {WITH_LIMIT} or on () topk(1, {TEMPERATURE})", "GPU {{gpu}}{{text}}"),
    text=BigValueTextMode.VALUE_AND_NAME,
    steps=((0, NORMAL),),
    overrides=by_regexp(fixed_colors({"/slowed down/": CAUTION})),
    title_size=TITLE_SIZE,
    width=8,
)
THROTTLED = value(
    "Throttled, and why",
    "The GPU that is throttled for the largest share of the time, and the driver's reason.",
    "percentunit",
    Query(f"{WHO_IS_THROTTLED} or on () {NOT_THROTTLED}", "{{who}}"),
    steps=((0, NORMAL), (Thresholds().throttled, CAUTION)),
    text=BigValueTextMode.VALUE_AND_NAME,
    title_size=TITLE_SIZE,
    width=8,
)
ERRORS = value(
    "XID and ECC errors",
    "XID errors of all GPUs since the exporter started, with the last one, and uncorrected memory errors since the "
    "driver was loaded. NVIDIA's XID catalog explains the codes.",
    "none",
    Query(f"{WITH_LAST_XID} or on () {XIDS}", "XIDs{{last}}"),
    Query(f"{WITH_ECC_GPU} or on () max({ECC})", "ECC{{place}}"),
    steps=((0, NORMAL), (1, CAUTION)),
    text=BigValueTextMode.VALUE_AND_NAME,
    title_size=TITLE_SIZE - 1,
    width=8,
)

OVER_TIME = Row(
    "How do the GPUs work?",
    (
        lines(
            "Busy",
            "Share of the time in which a kernel was running: the exact average over each interval of the graph, as "
            "the exporter integrates the driver's samples. A kernel that waits for other ranks counts as busy.",
            "percentunit",
            Query(BUSY, GPU),
            max_val=1,
            width=8,
        ),
        lines(
            "Memory used",
            "Memory that processes have allocated, without the driver's reserve. Dashed: total memory of a GPU.",
            "bytes",
            Query(f"max by (gpu) (rankscope_gpu_memory_used_bytes{{{HERE}}})", GPU),
            Query(f"max(rankscope_gpu_memory_total_bytes{{{HERE}}})", "total"),
            dashed="total",
            width=8,
        ),
        lines(
            "Power",
            "Average power from the energy counter. Single readings would cover only a quarter of the time on an A100 "
            "or H100. Check an idle GPU with high power, or a busy one with low power: a hung collective keeps a GPU "
            "busy at low power.",
            "watt",
            Query(f"max by (gpu) (rate(rankscope_gpu_energy_joules_total{{{HERE}}}[$__rate_interval]))", GPU),
            Query(f"max(rankscope_gpu_power_limit_watts{{{HERE}}})", "limit"),
            dashed="limit",
            width=8,
        ),
        lines(
            "Temperature",
            "Core temperature of each GPU.",
            "celsius",
            Query(TEMPERATURE, GPU),
            width=8,
        ),
        lines(
            "SM clock",
            "Clock of the multiprocessors, and the GPU's maximum.",
            "hertz",
            Query(f'max by (gpu) (rankscope_gpu_clock_hertz{{{HERE},domain="sm"}})', GPU),
            Query(f'max(rankscope_gpu_clock_max_hertz{{{HERE},domain="sm"}})', "maximum"),
            dashed="maximum",
            width=8,
        ),
        lines(
            "Throttled, by reason",
            "Share of the time in which the GPU was throttled, by reason. Several reasons can apply at the same time.",
            "percentunit",
            Query(f"{THROTTLED_RATIO} > 0", f"{GPU} {{{{reason}}}}", needs_fault=True),
            max_val=1,
            width=8,
            empty="not throttled",
        ),
        shares(
            "GPU time by state",
            "The GPUs' time by state, averaged over the GPUs. A pause of up to a minute counts as working. Allocated "
            "and unused GPUs could be used by other jobs.",
            Query(f"avg by (state) (rate(rankscope_gpu_state_seconds_total{{{HERE}}}[$__rate_interval]))", "{{state}}"),
            colors=STATE_COLORS,
            width=8,
        ),
    ),
    collapsed=True,
)

NETWORK = Row(
    "Network",
    (
        lines(
            "Traffic",
            "Traffic of InfiniBand and RoCE ports in both directions, and the link rate of the fastest port.",
            "Bps",
            Query(
                f"rate(rankscope_network_port_received_bytes_total{{{HERE}}}[$__rate_interval])"
                f" + rate(rankscope_network_port_transmitted_bytes_total{{{HERE}}}[$__rate_interval])",
                "{{port}}",
                needs_fault=True,
            ),
            Query(f"max(rankscope_network_port_rate_bytes_per_second{{{HERE}}})", "rate", needs_fault=True),
            dashed="rate",
            empty="no InfiniBand or RoCE port",
        ),
        lines(
            "Errors",
            "Errors and retransmissions per second of InfiniBand and RoCE ports, and packets dropped by interfaces.",
            "si:/s",
            Query(
                f"rate(rankscope_network_port_errors_total{{{HERE}}}[$__rate_interval]) > 0",
                "{{port}} {{error}}",
                needs_fault=True,
            ),
            Query(
                f"rate(rankscope_network_interface_dropped_packets_total{{{HERE}}}[$__rate_interval]) > 0",
                "{{port}} dropped ({{direction}})",
                needs_fault=True,
            ),
            empty="no errors",
        ),
    ),
    collapsed=True,
)
