"""The fixtures of the server's own tests, for the attacks."""

from __future__ import annotations

from tests.exporter.web.conftest import authority, checked, serve, web_config

__all__ = ["authority", "checked", "serve", "web_config"]
