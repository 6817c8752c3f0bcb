"""What an attacker knows of the node, and who is who on it."""

from __future__ import annotations

import ssl
from collections import Counter
from dataclasses import dataclass

VICTIM, ATTACKER, EXPORTER = 61_001, 61_002, 61_003  # users without a name

RUN = "victim"
RANKS = 2
GPUS = 4
INSIDER = "fuzz", "right"
"""A user of the exporter's pages who attacks, by the name and password that validation/fuzz/requests.py sends."""

Seen = Counter[str]
"""What became of an attacker's acts, by kind."""


@dataclass(frozen=True)
class Target:
    """The node, as an attacker sees it."""

    run_dir: str
    """That everybody writes to."""
    closed_dir: str
    """Another that the exporter reads; it belongs to the attacker."""
    host: str
    port: int
    source: str
    """The address that this attacker's connections come from."""
    tls: bool = False
    """Whether the port speaks TLS."""
    share: float = 0.0
    """Of a processor, for one that attacks nothing and takes only that."""


def any_server() -> ssl.SSLContext:
    """Return a client's context that trusts every server: here the server is attacked, and no client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
