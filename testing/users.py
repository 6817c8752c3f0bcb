"""Other users of the machine."""

from __future__ import annotations

import os

NOBODY = 65534


def become(uid: int) -> None:
    """Give up this process's user for another one; only root can.

    Everything has to be imported before: other users may be unable to enter the directory of the interpreter.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
