"""The exporter's server as its own tests start it, for those that attack it."""

from __future__ import annotations

from tests.exporter.web.conftest import authority, checked, serve, web_config

__all__ = ["authority", "checked", "serve", "web_config"]
