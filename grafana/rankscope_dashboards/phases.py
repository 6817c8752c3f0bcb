"""The colours of phases and causes, the same on every panel.

Computing is green; waiting for others red; what keeps a rank from computing in the colours between.
"""

from __future__ import annotations

from rankscope_dashboards.panels import NEUTRAL

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
