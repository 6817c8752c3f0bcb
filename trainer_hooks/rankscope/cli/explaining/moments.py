"""Times: parsing of `--at`, and formatting of a server's times, which may be invalid."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import datetime

CLOCKS_APART = 60.0  # seconds between this machine's clock and Prometheus'
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
INVALID_TIME = (ValueError, OverflowError, OSError)  # of a time outside the calendar; it depends on how far outside


def parse_moment(text: str) -> float:
    """Return unix seconds from a number, `30m` (ago) or an ISO 8601 time. Raises ValueError."""
    try:
        moment = _moment(text)
    except INVALID_TIME:
        moment = -1.0
    if moment < 0:
        raise ValueError(f"--at {text} is not a time such as 30m (ago), 2026-11-21T02:40 or 1795228800")
    if moment > time.time() + CLOCKS_APART:
        raise ValueError(f"--at {text} is in the future")
    return moment


def format_time(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return unix seconds in this machine's time zone, or the number if they are no valid time."""
    with contextlib.suppress(*INVALID_TIME):
        return datetime.fromtimestamp(seconds).astimezone().strftime(form)
    return f"{seconds:.0f}"


def _moment(text: str) -> float:
    if ago := re.fullmatch(r"(\d+)([smhd])", text):
        return time.time() - int(ago[1]) * SECONDS[ago[2]]
    # Python 3.10 does not know the Z.
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else datetime.fromisoformat(_utc(text)).timestamp()


def _utc(text: str) -> str:
    return re.sub("[zZ]$", "+00:00", text)
