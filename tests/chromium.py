"""A headless Chromium driven over a pipe, with nothing but the standard library: real pages, real clicks."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_SECONDS = 1200


def find_chromium() -> str | None:
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One page; errors of its script and addresses that it asked for are kept as they come.

    It speaks the DevTools protocol: messages end in a zero byte, over file descriptors 3 and 4.
    """

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._replies: dict[int, Any] = {}
        self._count, self._rest = 0, b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        browser = find_chromium()
        assert browser is not None
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", browser, *flags.split()]
            + [f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        page = next(t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def resize(self, width: int, height: int) -> None:
        """Makes the window that large; narrow ones are phones."""
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, path: Path, ready: str) -> None:
        """Loads a file and waits until the JavaScript expression `ready` holds."""
        self.errors.clear()
        self.requests.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        self.wait(ready)

    def wait(self, condition: str) -> None:
        """Waits until a JavaScript expression holds."""
        end = time.monotonic() + WAIT_SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end and not self.errors, (condition, self.errors)
            time.sleep(0.1)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def click(self, selector: str, number: int = 0) -> None:
        """Presses the mouse in the middle of an element."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """A PNG of the whole page, or of the window."""
        picture = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def ask(self, method: str, **params: Any) -> Any:
        """One command to the page."""
        return self._ask(method, self._session, **params)

    def _ask(self, method: str, session: str | None = None, /, **params: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while self._count not in self._replies:
            self._read()
        reply = self._replies.pop(self._count)
        assert "error" not in reply, reply
        return reply["result"]

    def _read(self) -> None:
        data = os.read(self._in, 1 << 20)
        assert data, "the browser has gone"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._replies[message["id"]] = message
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:2000])
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
