"""The monitoring stack, fast or as shipped: exporters, Prometheus with the rules, Alertmanager, a webhook receiver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from deploy.prometheus import fast

from testing import servers
from testing.webhook import Notification, WebhookReceiver

SomeServer = TypeVar("SomeServer", bound=servers.Server)


class Stack:
    """The servers, started and stopped with the context."""

    def __init__(
        self,
        directory: Path,
        exporters: Sequence[servers.Server],
        on_notification: Callable[[Notification], None] = lambda _: None,
        on_start: Callable[[servers.Server], None] = lambda _: None,
        speed: ModuleType = fast,
        targets: Sequence[str] | None = None,
    ) -> None:
        """Prepare the stack. `speed` is the module with its configurations; by default it scrapes `exporters`."""
        self._directory, self._on_start, self._speed = directory, on_start, speed
        self._targets = targets or [server.address for server in exporters]
        self.exporters = exporters
        self.webhook = WebhookReceiver(on_notification)

    def __enter__(self) -> Stack:
        with ExitStack() as started:
            started.enter_context(self.webhook)
            for exporter in self.exporters:
                self._start(exporter, started)
            configuration = self._speed.alertmanager_config(self.webhook.url)
            self.alertmanager = self._start(servers.alertmanager(self._directory, configuration), started)
            configuration = self._speed.prometheus_config(self._targets, self.alertmanager.address)
            self.prometheus = self._start(servers.prometheus(self._directory, configuration), started)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def notified(self, name: str, within: float, since: float = 0.0) -> Notification | None:
        """Return the first notification of the alert since `since` (unix time). Waits up to `within` seconds."""
        wait_for(lambda: self._found(name, since), within)
        return self._found(name, since)

    def _found(self, name: str, since: float) -> Notification | None:
        found = (n for n in self.webhook.firing() if n.name == name and n.received >= since)
        return next(found, None)

    def _start(self, server: SomeServer, started: ExitStack) -> SomeServer:
        started.enter_context(server)
        self._on_start(server)
        return server


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Wait up to `seconds` for the condition. Return whether it came true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False
