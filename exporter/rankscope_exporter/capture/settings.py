"""The flags of captures."""

from __future__ import annotations

import argparse
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rankscope_exporter.flags import flag

HOOK, PY_SPY, NONE = "hook", "py-spy", "none"
STACKS = (HOOK, PY_SPY, NONE)
"""Where a capture may have stacks from: the hook's own handler; py-spy, which pauses the process; nowhere."""
STACKS_HELP = (
    "how to read the stacks of ranks: by the handler that the hook has in the job, by py-spy if it is installed, which "
    "pauses the process for a moment, or not at all (default: %(default)s)"
)
DEFAULT_MIB, DEFAULT_DAYS = 512, 14.0
ENTERED = 0o711
"""The mode of a directory that other users may enter and not list."""
LEAST_MIB = 128
"""More than one capture of the largest size."""


def directory(text: str) -> Path:
    """Return a directory that no other user than root can change, and create it if needed. Raise ArgumentTypeError.

    The path is that without links, which someone could change later.
    """
    path = Path(os.path.realpath(text))
    try:
        if not path.exists():
            path.mkdir()
            path.chmod(ENTERED)
        status = path.stat()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    for one in (path, *path.parents):
        if reason := _weakness(one, may_be_sticky=one != path):
            raise argparse.ArgumentTypeError(reason)
    if not os.access(path, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} is not writable")
    return path


def _weakness(path: Path, *, may_be_sticky: bool) -> str:
    """Return why another user could replace what is in a directory; empty if none could."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid(), Path("/").stat().st_uid):  # in a user namespace, root may be unknown
        return f"{path} belongs to another user ({status.st_uid})"
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and not (may_be_sticky and status.st_mode & stat.S_ISVTX):
        return f"{path} is writable by other users (chmod go-w)"
    return ""


def _mebibytes(text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST_MIB:
        raise argparse.ArgumentTypeError(f"must be a number of at least {LEAST_MIB}")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0.0 < days < 36500.0:
        raise argparse.ArgumentTypeError("must be a number of days above 0")
    return days


@dataclass(frozen=True, kw_only=True)
class CaptureFlags:
    """The settings of captures."""

    capture_dir: Path | None = flag(
        "--capture-dir",
        type=directory,
        metavar="DIR",
        help="directory for captures: what this node knows about a run that hangs or crashed, with stacks, in a folder "
        "each that the run's owner may read (default: nothing is captured; docs/hangs.md)",
    )
    capture_stacks: str = flag("--capture.stacks", choices=STACKS, default=HOOK, help=STACKS_HELP)
    capture_mebibytes: int = flag(
        "--capture.size-limit",
        type=_mebibytes,
        default=DEFAULT_MIB,
        metavar="MIB",
        help="size of all captures; the oldest ones of the user with the most are removed (default: %(default)s MiB)",
    )
    capture_days: float = flag(
        "--capture.retention",
        type=_days,
        default=DEFAULT_DAYS,
        metavar="DAYS",
        help="age from which captures are removed (default: 14 days)",
    )
