"""A headless Chromium that tests drive over two pipes: pages at a width, in a theme, and what scripts find.

It speaks the DevTools protocol (https://chromedevtools.github.io/devtools-protocol/), of which it needs a dozen calls.
Nothing is fetched: a page is handed over as text.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# The browser reads its commands from descriptor 3 and answers on 4.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
HIGH = 10  # descriptors from here on: 3 and 4 are not among them


def find_chromium() -> str | None:
    """Return the path of a Chromium on this machine, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one tab. To be used in a `with` statement, which ends it."""

    def __init__(self, executable: str, folder: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in (ours[0], theirs[1]))
        command = [sys.executable, "-c", LAUNCH, str(read), str(write), executable, *FLAGS, f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            command, pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in (ours[0], theirs[1], read, write):
            os.close(fd)
        self._to, self._from = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb")
        self._unread, self._number, self._session = b"", 0, ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._frame = self._call("Page.getFrameTree")["frameTree"]["frame"]["id"]

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()

    def show(self, page: str, width: int, dark: bool) -> None:
        """Show a page in a window of this width, as tall as the page."""
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=theme)
        self._size(width, 800)
        self._call("Page.setDocumentContent", frameId=self._frame, html=page)
        self._size(width, max(800, self.evaluate("document.documentElement.scrollHeight")))

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _size(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method, and return its result; events that come in between are passed over."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        self._to.write(json.dumps(asked).encode() + b"\0")
        while True:
            answer = json.loads(self._message())
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _message(self) -> bytes:
        while b"\0" not in self._unread:
            more = os.read(self._from.fileno(), 1 << 16)
            assert more, f"the browser ended with status {self._process.wait()}"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return message
