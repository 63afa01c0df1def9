"""A headless Chromium for tests, driven over its DevTools protocol through a pair of pipes.

    with Browser() as browser:
        page = browser.open(path)
        page.evaluate("document.title")

Commands are JSON texts that end in a zero byte, on file descriptors 3 (to the browser) and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A page takes a fraction of this; a browser that starts on a busy machine can take seconds.
_TIMEOUT_S = 60.0


def executable() -> str | None:
    """Where a Chromium is; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process, which ends with the context."""

    def __init__(self) -> None:
        found = executable()
        assert found is not None, "no Chromium is installed"
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._in = os.pipe()
        self._out, from_browser = os.pipe()

        def wire() -> None:
            # Copies first: either pipe may be 3 or 4 already.
            ends = os.dup(to_browser), os.dup(from_browser)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        flags = (
            "--headless=new",
            "--no-sandbox",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            "--force-color-profile=srgb",
            "--hide-scrollbars",
            f"--user-data-dir={self._home.name}",
            "about:blank",
        )
        # close_fds would close what wire() has made.
        self._process = subprocess.Popen(
            [found, *flags],
            close_fds=False,
            preexec_fn=wire,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._in)
            os.close(self._out)
            self._home.cleanup()

    def open(self, path: Path, width: int = 1280, height: int = 900, scale: float = 1) -> Tab:
        """A tab that shows the page at ``path``, with nothing of the network but what it asks."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        tab.call("Runtime.enable")
        tab.call("Log.enable")
        tab.call("Network.enable")
        tab.call("Page.enable")
        tab.resize(width, height, scale)
        tab.call("Page.navigate", url=path.resolve().as_uri())
        tab.until("Page.loadEventFired")
        return tab

    def call(self, method: str, session: str = "", **params: object) -> dict[str, Any]:
        """The result of ``method``; events that come before it are kept."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        waiting = memoryview(json.dumps(message).encode() + b"\0")
        while waiting:
            waiting = waiting[os.write(self._in, waiting) :]
        while True:
            found = self.read()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found.get('error')}"
                return dict(found["result"])
            self.events.append(found)

    def read(self) -> dict[str, Any]:
        """The next message of the browser."""
        end = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._out], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            found = os.read(self._out, 1 << 20)
            assert found, "the browser has ended"
            self._unread += found
        text, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(text))


class Tab:
    """One page.  Coordinates are CSS pixels from the top left of what is seen."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **params: object) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """What has happened so far, of ``methods``."""
        mine = (event for event in self.browser.events if event.get("sessionId") == self.session)
        return [event["params"] for event in mine if event["method"] in methods]

    def until(self, method: str) -> None:
        while not self.events(method):
            self.browser.events.append(self.browser.read())

    def evaluate(self, expression: str) -> Any:
        """What JavaScript makes of ``expression``, once promises are kept; raises for an error."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.evaluate("new Promise(d => requestAnimationFrame(() => requestAnimationFrame(d)))")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def emulate(self, **features: str) -> None:
        """For example ``prefers_color_scheme="dark"``."""
        named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def move(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.settle()

    def click(self, x: float, y: float) -> None:
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)
        self.settle()

    def drag(
        self, start: tuple[float, float], end: tuple[float, float], modifiers: int = 0
    ) -> None:
        common = {"button": "left", "modifiers": modifiers}
        self.mouse("mousePressed", *start, clickCount=1, **common)
        for share in (0.2, 0.6, 1.0):
            x, y = (a + share * (b - a) for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, buttons=1, **common)
        self.mouse("mouseReleased", *end, clickCount=1, **common)
        self.settle()

    def press(self, key: str, times: int = 1, modifiers: int = 0) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for _ in range(times):
            self.call(
                "Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers, **text
            )
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)
        self.settle()

    def screenshot(self, clip: dict[str, float] | None = None, whole: bool = False) -> bytes:
        """PNG of what is seen, of the part ``clip`` of the page, or of the whole page."""
        more: dict[str, object] = {} if clip is None else {"clip": {**clip, "scale": 1}}
        found = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more
        )
        return base64.b64decode(found["data"])

    def wait(self, is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while not is_there():
            assert time.monotonic() < end
            self.settle()
