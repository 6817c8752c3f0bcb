"""The colours of phases and causes, the same on every panel.

Computing is green; waiting for others red; what keeps a rank from computing in the colours between; the host's waiting
for the device, which computes meanwhile, is blue.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from rankscope.record import phases
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
# deploy/prometheus/causes.yml has those of the causes that are no phases.
LOST = yaml.safe_load((Path(__file__).parents[2] / "deploy/prometheus/causes.yml").read_text(encoding="utf-8"))["lost"]
CAUSES = PHASES | {cause: fields["colour"] for cause, fields in LOST.items() if "colour" in fields}
