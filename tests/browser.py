"""A headless Chromium, driven through a pipe with the standard library alone.

Chromium reads the DevTools protocol from descriptor 3 and answers on descriptor 4: JSON, with a zero byte
after each message.  Where it is not installed, `chromium` says so and tests are skipped; with
``TIERSTORE_REQUIRE_BROWSER=1`` that is a failure.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

_NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
_REQUIRE = "TIERSTORE_REQUIRE_BROWSER"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1200,900",
    "--remote-debugging-pipe",
)
_ANSWER_TIMEOUT_S = 120.0
_CHUNK_BYTES = 1 << 16

Message = dict[str, object]


def chromium() -> str:
    """Return the path of a Chromium; skip the test, or fail where one is required, if there is none."""
    found = next((path for path in map(shutil.which, _NAMES) if path), None)
    if found is not None:
        return found
    if os.environ.get(_REQUIRE) == "1":
        pytest.fail(f"no headless Chromium is installed (looked for {', '.join(_NAMES)}), and {_REQUIRE}=1")
    pytest.skip("needs a headless Chromium: apt-get install chromium-headless-shell")


class Browser:
    """One Chromium with one tab."""

    def __init__(self, requests: int, answers: int) -> None:
        self.events: list[Message] = []
        self._requests = requests
        self._answers = answers
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = str(self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> Message:
        """Ask for something and return the answer; what happens meanwhile is kept in `events`."""
        self._count += 1
        request: Message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        _write_all(self._requests, json.dumps(request).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") != self._count:
                self.events.append(message)
                continue
            if "error" in message:
                raise RuntimeError(f"{method}: {message['error']}")
            return cast(Message, message["result"])

    def open(self, path: Path) -> None:
        """Open a file, and return when all of it is there and has been drawn once."""
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        self.settle()

    def settle(self) -> None:
        """Return when what was asked for has been drawn."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def evaluate(self, expression: str) -> object:
        """Return the value of an expression of JavaScript; of a promise, what it was kept with."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return cast(Message, answer["result"]).get("value")

    def mouse(self, kind: str, x: float, y: float, **more: object) -> None:
        """Send an event of the mouse: ``"Moved"``, ``"Pressed"``, ``"Released"`` or ``"Wheel"``."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)
        self.settle()

    def press(self, key: str) -> None:
        """Press and let go a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)
        self.settle()

    def screenshot(self, x: float, y: float, width: int, height: int) -> bytes:
        """Return a PNG of a part of the page, so many pixels wide and high."""
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        return base64.b64decode(str(self.call("Page.captureScreenshot", clip=clip)["data"]))

    def asked_for(self) -> list[str]:
        """Return the URLs of all requests since the page was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [str(cast(Message, _parameters(event)["request"])["url"]) for event in sent]

    def complaints(self) -> list[Message]:
        """Return what was written to the console, and what was thrown and not caught."""
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [_parameters(event) for event in self.events if event.get("method") in methods]

    def _message(self) -> Message:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], _ANSWER_TIMEOUT_S)
            chunk = os.read(self._answers, _CHUNK_BYTES) if ready else b""
            if not chunk:
                raise RuntimeError("the browser ended" if ready else "the browser does not answer")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return cast(Message, json.loads(message))


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield a browser of its own, with a profile of its own; both are gone at the end."""
    path = chromium()
    requests, answers = os.pipe(), os.pipe()
    # The shell puts the descriptors where Chromium looks for them: no Python runs in the child.
    places = f'exec "$0" "$@" 3<&{requests[0]} 4>&{answers[1]}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", places, path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(requests[0], answers[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(requests[0])
        os.close(answers[1])
        try:
            yield Browser(requests[1], answers[0])
        finally:
            os.close(requests[1])  # the end of its pipe ends it
            os.close(answers[0])
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _parameters(event: Message) -> Message:
    return cast(Message, event["params"])


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
