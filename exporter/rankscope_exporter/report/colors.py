"""The colors of the dashboards, the status page, `rankscope top` and the documentation: the only table of them.

Computing is blue and waiting for other ranks orange, which also differ without red and green.
All phases differ from each other (tests/exporter/report/test_colors.py computes by how much). Red, orange and green
are severities: no rank has such a color.
"""

from __future__ import annotations

BAD, CAUTION, GOOD, NEUTRAL = "#e02f44", "#d9660f", "#1a8a5c", "#808080"
"""The severities: critical, warning, healthy, unknown or over."""

PHASE_COLORS = {
    "other": "#f9c118",
    "startup": "#808080",
    "data_wait": "#8c4a1a",
    "h2d_copy": "#f6c0a1",
    "forward": "#4496f9",
    "backward": "#123fd6",
    "collective_wait": "#c98204",
    "device_wait": "#385d5b",
    "optimizer": "#b5d9fd",
    "checkpoint": "#875e9d",
    "evaluation": "#4edbbc",
}
OWN_COLOR = "#b889b8"
"""The color of phases that the script defines."""

CAUSE_COLORS = PHASE_COLORS | {
    "none": "#4496f9",
    "throttling": "#123fd6",
    "data_cpu": "#8c4a1a",
    "data_io": "#c97b45",
    "data": "#a85f2a",
    "copies": "#f6c0a1",
    "transfer": "#f0b95b",
    "bubble": "#f7deb0",
    "stage_imbalance": "#5b3b73",
    "straggler": "#c98204",
    "launch": "#8a7d12",
    "device_read": "#ded58f",
    "stall": BAD,
    "idle": "#a1a4a4",
    "unknown": "#c0c0c0",
}
"""The colors of what GPU time is lost to: the values of `cause` of `rankscope_run_lost_ratio`."""

STATE_COLORS = {
    "working": "#4496f9",
    "free": "#a1a4a4",
    "allocated_no_process": "#f6c0a1",
    "process_no_work": "#f9c118",
    "memory_held_by_dead": "#875e9d",
    "suspected_hang": BAD,
    "unknown": NEUTRAL,
}
"""The colors of a GPU's states of use."""

RANK_COLORS = (
    *("#3e92af", "#bf6598", "#9ad4cd", "#aa14f0", "#707070"),
    *("#8589fc", "#2c6065", "#cbbbe7", "#56608f", "#a1a4a4"),
)
"""By the last digit of a rank's or GPU's number: any ten consecutive ranks have different colors."""
