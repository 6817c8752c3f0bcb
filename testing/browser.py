"""A headless Chromium, which tests control over a pipe: what is on a page, and what its script does."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
MISSING = "no Chromium here: `make browser` installs it"


def program() -> str | None:
    """Return the path of Chromium, None if it is not installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Tab:
    """A page that is open."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def command(self, method: str, **parameters: Any) -> Any:
        return self._browser.command(method, self._session, **parameters)

    def run(self, script: str) -> Any:
        """Return the value of a script, after its promise. Raise AssertionError if it throws."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.command("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def show(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the window's size, and the color scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def save(self, path: Path) -> None:
        """Save a picture of the whole page."""
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


class Browser:
    """Chromium's end of the pipe: JSON messages, each with a zero byte at its end."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of = os.fdopen(to, "wb", buffering=0), os.fdopen(of, "rb", buffering=0)
        self._numbers, self._rest = count(1), b""

    def open(self, url: str) -> Tab:
        """Open a page, and return it when it has loaded."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        tab = Tab(self, self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        tab.command("Page.bringToFront")  # the page's script waits while it is hidden
        tab.command("Page.navigate", url=url)
        tab.run("new Promise(done=>document.readyState=='complete'?done():addEventListener('load',()=>done()))")
        return tab

    def command(self, method: str, session: str = "", **parameters: Any) -> Any:
        """Return the result of a command of the DevTools protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        self._to.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._of.read(1 << 16)
            assert read, "Chromium has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def close(self) -> None:
        self._to.close()
        self._of.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium. It reads from its descriptor 3 and writes to 4."""
    (read, to), (of, write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [str(program()), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *command]
        with subprocess.Popen(shell, pass_fds=(read, write), stderr=subprocess.DEVNULL) as process:
            os.close(read)
            os.close(write)
            opened = Browser(to, of)
            try:
                yield opened
            finally:
                process.kill()
                opened.close()
