"""A receiver for Alertmanager's webhook that keeps every notification and can print it as one readable line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from testing.http_server import LoopbackServer, sent


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


class WebhookReceiver(LoopbackServer):
    """A server on loopback; `notifications` grows as they arrive."""

    def __init__(self, on_notification: Callable[[Notification], None] = lambda _: None) -> None:
        self.notifications: list[Notification] = []
        self._on_notification = on_notification
        super().__init__(self._receive)
        self.url = f"http://127.0.0.1:{self.port}/"

    def firing(self) -> list[Notification]:
        """Return the notifications of firing alerts, in the order of arrival."""
        return [notification for notification in self.notifications if notification.is_firing]

    def _receive(self, request: BaseHTTPRequestHandler) -> None:
        received = time.time()  # the same for all alerts of a message
        message: dict[str, Any] = json.loads(sent(request))
        for alert in message["alerts"]:
            fields = (alert["status"], alert["labels"], alert["annotations"], alert["startsAt"])
            notification = Notification(*fields, received=received)
            self.notifications.append(notification)
            self._on_notification(notification)
        request.send_response(200)
        request.end_headers()
