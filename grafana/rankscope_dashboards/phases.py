"""The colours of phases and causes, the same on every panel.

Computing is green; waiting for others red; what keeps a rank from computing in the colours between; the host's waiting
for the device, which computes meanwhile, is blue.
"""

from __future__ import annotations

from rankscope import phases
from rankscope_dashboards.panels import NEUTRAL

COLORS = {
    "forward": "semi-dark-green",
    "backward": "dark-green",
    "optimizer": "light-green",
    "collective_wait": "semi-dark-red",
    "device_wait": "light-blue",
    "data_wait": "semi-dark-orange",
    "h2d_copy": "light-yellow",
    "other": "semi-dark-yellow",
    "checkpoint": "semi-dark-purple",
    "evaluation": "semi-dark-blue",
    "startup": NEUTRAL,
}
PHASES = {name: COLORS[name] for name in phases.NAMES}
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
    "launch": "dark-yellow",
    "device_read": "super-light-yellow",
    "idle": "dark-blue",
}
