"""The rows of the dashboard *Node* about the hardware: power, heat and clocks; throttling and errors; the network."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import CAUTION, Query, lines
from rankscope_dashboards.selectors import GPU, HERE
from rankscope_dashboards.tables import Column, table_of

POWER = Row(
    "Power, heat and clocks",
    (
        lines(
            "Power",
            "Average power by the energy counter; single readings would miss three quarters of the time on an A100 or "
            "H100. An idle GPU that draws much, or a busy one that draws little, is worth a look: a hung collective "
            "keeps a GPU busy at low power.",
            "watt",
            Query(f"rate(rankscope_gpu_energy_joules_total{{{HERE}}}[$__rate_interval])", GPU),
            Query(f"max(rankscope_gpu_power_limit_watts{{{HERE}}})", "limit"),
            dashed="limit",
        ),
        lines(
            "Power, single readings",
            "The driver's newest power reading at each scrape: what the average hides.",
            "watt",
            Query(f"rankscope_gpu_power_watts{{{HERE}}}", GPU),
        ),
        lines(
            "Temperature",
            "The GPU's core temperature.",
            "celsius",
            Query(f"rankscope_gpu_temperature_celsius{{{HERE}}}", GPU),
            width=8,
        ),
        lines(
            "SM clock",
            "Clock of the multiprocessors, and the highest that this GPU can run at.",
            "hertz",
            Query(f'rankscope_gpu_clock_hertz{{{HERE},domain="sm"}}', GPU),
            Query(f'max(rankscope_gpu_clock_max_hertz{{{HERE},domain="sm"}})', "maximum"),
            dashed="maximum",
            width=8,
        ),
        lines(
            "Memory clock",
            "Clock of the memory, and the highest that this GPU can run at.",
            "hertz",
            Query(f'rankscope_gpu_clock_hertz{{{HERE},domain="memory"}}', GPU),
            Query(f'max(rankscope_gpu_clock_max_hertz{{{HERE},domain="memory"}})', "maximum"),
            dashed="maximum",
            width=8,
        ),
    ),
)

TROUBLE = Row(
    "Throttling and errors",
    (
        lines(
            "Throttled",
            "Share of the time in which something held the clocks down, by reason; several can hold at once.",
            "percentunit",
            Query(
                f"rate(rankscope_gpu_throttled_seconds_total{{{HERE}}}[$__rate_interval]) > 0",
                f"{GPU} {{{{reason}}}}",
                needs_fault=True,
            ),
            none="nothing throttled",
        ),
        lines(
            "XID errors",
            "Errors that the driver reported in each step of the graph.",
            "none",
            Query(f"sum by (gpu) (increase(rankscope_gpu_xid_errors_total{{{HERE}}}[$__rate_interval]))", GPU),
            width=6,
        ),
        table_of(
            "XID errors by code",
            "Errors since the exporter started. NVIDIA's XID catalog says what each code means.",
            [Query(f"sum by (gpu, xid) (rankscope_gpu_xid_errors_total{{{HERE}}}) > 0", needs_fault=True)],
            [Column("gpu", "GPU"), Column("xid", "XID"), Column("A", "Errors", steps=((None, CAUTION),))],
            width=6,
            none="none",
        ),
    ),
)

NETWORK = Row(
    "Network",
    (
        lines(
            "Traffic",
            "What InfiniBand and RoCE ports receive and transmit, and the rate of the fastest one.",
            "Bps",
            Query(
                f"rate(rankscope_network_port_received_bytes_total{{{HERE}}}[$__rate_interval])"
                f" + rate(rankscope_network_port_transmitted_bytes_total{{{HERE}}}[$__rate_interval])",
                "{{port}}",
                needs_fault=True,
            ),
            Query(f"max(rankscope_network_port_rate_bytes_per_second{{{HERE}}})", "rate", needs_fault=True),
            dashed="rate",
            none="no InfiniBand or RoCE port",
        ),
        lines(
            "Errors",
            "Errors and retransmissions of InfiniBand and RoCE ports per second, and packets that interfaces drop.",
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
            none="no errors",
        ),
    ),
)
