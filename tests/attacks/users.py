"""The users of the attacks. Only root can become several users."""

from __future__ import annotations

import os

import pytest

VICTIM, MALLORY = 61_001, 61_002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="did not run: only root can be several users")
