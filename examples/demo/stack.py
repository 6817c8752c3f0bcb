"""All that watches, at the fast speed: exporters, Prometheus with the rules, Alertmanager, a webhook receiver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from deploy.prometheus.fast import alertmanager_config, prometheus_config

from examples.demo import servers
from examples.demo.webhook import Notification, WebhookReceiver

SomeServer = TypeVar("SomeServer", bound=servers.Server)


class Stack:
    """The servers, started when the context is entered and stopped when it is left."""

    def __init__(
        self,
        directory: Path,
        exporters: Sequence[servers.Server],
        on_notification: Callable[[Notification], None] = lambda _: None,
        on_start: Callable[[servers.Server], None] = lambda _: None,
    ) -> None:
        self._directory, self._on_start = directory, on_start
        self.exporters = exporters
        self.webhook = WebhookReceiver(on_notification)

    def __enter__(self) -> Stack:
        with ExitStack() as started:
            self.webhook.start()
            started.callback(self.webhook.stop)
            for exporter in self.exporters:
                self._start(exporter, started)
            configuration = alertmanager_config(self.webhook.url)
            alertmanager = self._start(servers.alertmanager(self._directory, configuration), started)
            configuration = prometheus_config([server.address for server in self.exporters], alertmanager.address)
            self.prometheus = self._start(servers.prometheus(self._directory, configuration), started)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def notified(self, name: str, within: float, since: float = 0.0) -> Notification | None:
        """The first notification of the alert `name` received after `since` (unix time), waiting `within` seconds."""
        wait_for(lambda: self._found(name, since), within)
        return self._found(name, since)

    def _found(self, name: str, since: float) -> Notification | None:
        found = (n for n in self.webhook.firing() if n.name == name and n.received >= since)
        return next(found, None)

    def _start(self, server: SomeServer, started: ExitStack) -> SomeServer:
        server.start()
        started.callback(server.stop)
        self._on_start(server)
        return server


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    """Whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False
