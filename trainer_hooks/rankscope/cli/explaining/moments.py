"""Moments: what `--at` takes, and how those that a server tells are said, which may be none."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import datetime

CLOCKS_APART = 60.0  # seconds, of this machine's and Prometheus'
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
NO_MOMENT = (ValueError, OverflowError, OSError)  # of what no calendar has; which of them depends on how far off it is


def parse_moment(text: str) -> float:
    """Unix seconds of such a number, of `30m` (that long ago) or of an ISO 8601 time. Raises ValueError."""
    try:
        moment = _moment(text)
    except NO_MOMENT:
        moment = -1.0
    if moment < 0:
        raise ValueError(f"--at {text} is no time such as 30m (ago), 2026-11-21T02:40 or 1795228800")
    if moment > time.time() + CLOCKS_APART:
        raise ValueError(f"--at {text} is in the future")
    return moment


def said(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Unix seconds in this machine's time; the number where they are no moment."""
    with contextlib.suppress(*NO_MOMENT):
        return datetime.fromtimestamp(seconds).astimezone().strftime(form)
    return f"{seconds:.0f}"


def said_iso(text: str) -> str:
    """An ISO 8601 time likewise; empty if it is none."""
    with contextlib.suppress(*NO_MOMENT):
        # Prometheus tells nanoseconds, which no Python takes.
        return said(datetime.fromisoformat(_utc(re.sub(r"\.\d+", "", text))).timestamp())
    return ""


def _moment(text: str) -> float:
    if ago := re.fullmatch(r"(\d+)([smhd])", text):
        return time.time() - int(ago[1]) * SECONDS[ago[2]]
    # Python 3.10 does not know the Z.
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else datetime.fromisoformat(_utc(text)).timestamp()


def _utc(text: str) -> str:
    return re.sub("[zZ]$", "+00:00", text)
