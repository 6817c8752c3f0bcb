"""The colors of phases and causes on all panels, from exporter/rankscope_exporter/diagnosis/causes.yml."""

from __future__ import annotations

from pathlib import Path

import yaml

from rankscope.record import phases

CAUSES_FILE = Path(__file__).parents[2] / "exporter/rankscope_exporter/diagnosis/causes.yml"

_file = yaml.safe_load(CAUSES_FILE.read_text(encoding="utf-8"))
PHASES = {name: _file["phase_colors"][name] for name in phases.NAMES}
CAUSES = PHASES | {cause: fields["color"] for cause, fields in _file["lost"].items() if "color" in fields}
