"""Reports as JSON. Unknown values are null, never NaN."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

DIGITS = 6


def as_json(report: Any) -> str:
    """Return the report, a dataclass, as one line of JSON, in ASCII."""
    return json.dumps(_plain(asdict(report)), allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return round(value, DIGITS) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
