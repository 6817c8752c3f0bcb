"""The rows of the dashboard *Node* about power, temperature, clocks, throttling, errors and the network."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import Query, lines
from rankscope_dashboards.selectors import GPU, HERE
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import CAUTION

POWER = Row(
    "Power, temperature and clocks",
    (
        lines(
            "Power",
            "Average power from the energy counter. Single readings would cover only a quarter of the time on an A100 "
            "or H100. Check an idle GPU with high power, or a busy one with low power: a hung collective keeps a GPU "
            "busy at low power.",
            "watt",
            Query(f"rate(rankscope_gpu_energy_joules_total{{{HERE}}}[$__rate_interval])", GPU),
            Query(f"max(rankscope_gpu_power_limit_watts{{{HERE}}})", "limit"),
            dashed="limit",
        ),
        lines(
            "Power, single readings",
            "The driver's latest power reading at each scrape. Shows peaks that the average hides.",
            "watt",
            Query(f"rankscope_gpu_power_watts{{{HERE}}}", GPU),
        ),
        lines(
            "Temperature",
            "Core temperature of each GPU.",
            "celsius",
            Query(f"rankscope_gpu_temperature_celsius{{{HERE}}}", GPU),
            width=8,
        ),
        lines(
            "SM clock",
            "Clock of the multiprocessors, and the GPU's maximum.",
            "hertz",
            Query(f'rankscope_gpu_clock_hertz{{{HERE},domain="sm"}}', GPU),
            Query(f'max(rankscope_gpu_clock_max_hertz{{{HERE},domain="sm"}})', "maximum"),
            dashed="maximum",
            width=8,
        ),
        lines(
            "Memory clock",
            "Clock of the memory, and the GPU's maximum.",
            "hertz",
            Query(f'rankscope_gpu_clock_hertz{{{HERE},domain="memory"}}', GPU),
            Query(f'max(rankscope_gpu_clock_max_hertz{{{HERE},domain="memory"}})', "maximum"),
            dashed="maximum",
            width=8,
        ),
    ),
)

ERRORS = Row(
    "Throttling and errors",
    (
        lines(
            "Throttled",
            "Share of the time in which the GPU was throttled, by reason. Several reasons can apply at the same time.",
            "percentunit",
            Query(
                f"rate(rankscope_gpu_throttled_seconds_total{{{HERE}}}[$__rate_interval]) > 0",
                f"{GPU} {{{{reason}}}}",
                needs_fault=True,
            ),
            empty="not throttled",
        ),
        lines(
            "XID errors",
            "Errors that the driver reported in each interval of the graph.",
            "none",
            Query(f"sum by (gpu) (increase(rankscope_gpu_xid_errors_total{{{HERE}}}[$__rate_interval]))", GPU),
            width=6,
        ),
        table_of(
            "XID errors by code",
            "Errors since the exporter started. NVIDIA's XID catalog explains the codes.",
            [Query(f"sum by (gpu, xid) (rankscope_gpu_xid_errors_total{{{HERE}}}) > 0", needs_fault=True)],
            [Column("gpu", "GPU"), Column("xid", "XID"), Column("A", "Errors", steps=((None, CAUTION),))],
            width=6,
            empty="none",
        ),
    ),
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
            "none",
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
)
