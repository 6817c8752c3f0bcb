"""Other users of the machine."""

from __future__ import annotations

import os

NOBODY = 65534


def become(uid: int) -> None:
    """Change this process's user and group; only root can.

    Import everything before: another user may be unable to enter the directory of the interpreter.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
