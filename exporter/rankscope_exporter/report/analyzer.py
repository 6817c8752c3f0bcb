"""The analyzer that diagnoses the runs of this node that span several nodes, as far as this node knows one."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection

from rankscope_exporter.diagnosis.readings import Run

KNOWN_FOR = 60.0
"""Seconds after its last pull for which an analyzer is named. It pulls every few seconds."""
ADDRESS = re.compile(r"[\w.:\[\]-]{1,255}", re.ASCII)


class Analyzer:
    """The address of an analyzer and the runs that hang, as it said when it last pulled this node's facts.

    Any thread may use it. Whoever may read the facts can say so. The address is shown as text, never as a link, and
    nothing connects to it. A run is captured only if its ranks stand still here, once for each time.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last: tuple[str, float] | None = None
        self._hanging: Collection[Run] = ()

    def record_pull(self, address: str, hanging: Collection[Run] = ()) -> None:
        """Record a pull by the analyzer at this address. Ignore others while the first one keeps pulling.

        Also ignore a text that is not `HOST:PORT` or a host's name.
        """
        if ADDRESS.fullmatch(address) and self.address in (None, address):
            self._last, self._hanging = (address, self._monotonic()), hanging

    def hanging(self) -> Collection[Run]:
        """Return the runs of this node that hang by its verdict; none if it has not pulled for KNOWN_FOR seconds."""
        return self._hanging if self.address else ()

    @property
    def address(self) -> str | None:
        """Return the address; None if no analyzer has pulled for KNOWN_FOR seconds."""
        address, at = self._last or (None, 0.0)
        return address if self._monotonic() - at <= KNOWN_FOR else None
