"""Alert thresholds that panels show, from deploy/prometheus/thresholds.yml."""

from __future__ import annotations

from pathlib import Path

import yaml

_PATH = Path(__file__).parents[2] / "deploy/prometheus/thresholds.yml"
_THRESHOLDS = yaml.safe_load(_PATH.read_text(encoding="utf-8"))

LOSS_LIMIT = _THRESHOLDS["loss_limit"]["value"]
THROTTLED_SHARE = _THRESHOLDS["throttled_share"]["value"]
