"""The colors of the phases, the same as in Grafana (diagnosis/causes.yml)."""

from __future__ import annotations

PHASE_COLORS = {
    "other": "#e0b400",
    "startup": "#808080",
    "data_wait": "#ff780a",
    "h2d_copy": "#ffee52",
    "forward": "#37872d",
    "backward": "#19730e",
    "collective_wait": "#e02f44",
    "device_wait": "#8ab8ff",
    "optimizer": "#96d98d",
    "checkpoint": "#a352cc",
    "evaluation": "#3274d9",
}
OWN_COLOR = "#b0a090"
"""The color of phases that the script defines."""
