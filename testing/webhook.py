"""A receiver for Alertmanager's webhook that keeps every notification and can print it as one readable line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Notification:
    """One alert of one message from Alertmanager. Times are unix seconds."""

    status: str
    labels: dict[str, str]
    annotations: dict[str, str]
    starts_at: str
    received: float

    @property
    def name(self) -> str:
        return self.labels["alertname"]

    @property
    def is_firing(self) -> bool:
        """Return whether it reports a fault, not its end."""
        return self.status == "firing"

    def line(self) -> str:
        """Return the notification as one line."""
        word = self.labels.get("severity", "firing") if self.is_firing else "resolved"
        clock = time.strftime("%H:%M:%S", time.localtime(self.received))
        return f"{clock}  {word.upper():9} {self.name}: {self.annotations.get('summary', '')}"


class WebhookReceiver:
    """A server on loopback; `notifications` grows as they arrive."""

    def __init__(self, on_notification: Callable[[Notification], None] = lambda _: None) -> None:
        self.notifications: list[Notification] = []
        self._on_notification = on_notification
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def firing(self) -> list[Notification]:
        """Return the notifications of firing alerts, in the order of arrival."""
        return [notification for notification in self.notifications if notification.is_firing]

    def _receive(self, message: dict[str, Any]) -> None:
        received = time.time()  # the same for all alerts of a message
        for alert in message["alerts"]:
            fields = (alert["status"], alert["labels"], alert["annotations"], alert["startsAt"])
            notification = Notification(*fields, received=received)
            self.notifications.append(notification)
            self._on_notification(notification)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._receive(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Alertmanager has its own log."""

        return Handler
