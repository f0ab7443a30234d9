"""What people look at: commands in a terminal, and the status page in a headless Chromium."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.helpers.environment import Environment
from tests.helpers.waiting import PATIENCE, wait_until

ROWS, COLUMNS = 24, 80


@dataclass
class Screen:
    """A command that runs in a terminal of its own. text: all that it has drawn, in its order."""

    process: subprocess.Popen[bytes]
    text: str = ""

    def shows(self, pattern: str) -> bool:
        return re.search(pattern, self.text) is not None


@contextmanager
def on_screen(env: Environment, *args: str) -> Iterator[Screen]:
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environ = {**env.environment(), "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    screen = Screen(
        subprocess.Popen(env.argv(*args), env=environ, stdin=slave, stdout=slave, stderr=slave)
    )
    os.close(slave)

    def read() -> None:
        data = b""
        with suppress(OSError):  # How a terminal says that nobody has it open any more.
            while piece := os.read(master, 65_536):
                data += piece
                text = data.decode("utf-8", "replace")
                screen.text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        reader.join()
        os.close(master)


@contextmanager
def serving(env: Environment) -> Iterator[str]:
    """Yields the page's address."""
    argv = env.argv("serve", "--listen", "127.0.0.1:0")
    with subprocess.Popen(
        argv, env=env.environment(), stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 128 + signal.SIGTERM


PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One tab. problems: what the browser has complained of, such as refused styles or scripts."""

    def __init__(self, to: IO[bytes], back: IO[bytes]) -> None:
        self._to, self._back = to, back
        self._asked = 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        tab = self._ask("Target.createTarget", url="about:blank")["targetId"]
        found = self._ask("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def look(self, url: str, *, width: int, dark: bool, scripts: bool = True) -> None:
        """Open a page as a screen of this width and taste would have it."""
        self._ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        size = {"width": width, "height": 900, "screenWidth": width, "screenHeight": 900}
        looks = {**size, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **looks)
        taste = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[taste])
        self._ask("Page.navigate", url=url)
        wait_until(lambda: self.tell("document.readyState") == "complete", "the page")

    def tell(self, expression: str) -> Any:
        """What an expression of JavaScript, or its promise, is worth on the page."""
        how = {"returnByValue": True, "awaitPromise": True}
        answer = self._ask("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path, height: int = 0) -> None:
        """The whole page, also what is below the window; or no more than its first pixels."""
        clip = {"x": 0, "y": 0, "width": self.tell("innerWidth"), "height": height, "scale": 1}
        shot = self._ask(
            "Page.captureScreenshot", captureBeyondViewport=True, **{"clip": clip} if height else {}
        )
        file.write_bytes(base64.b64decode(shot["data"]))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._asked += 1
        request = {"id": self._asked, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(request).encode() + b"\0")
        self._to.flush()
        while True:
            answer = json.loads(self._message())
            if answer.get("method") == "Log.entryAdded":
                self.problems.append(answer["params"]["entry"]["text"])
            if answer.get("id") == self._asked:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _message(self) -> bytes:
        said = bytearray()
        while (byte := self._back.read(1)) != b"\0":
            assert byte, "the browser has gone"
            said += byte
        return bytes(said)


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser; the test is skipped where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no Chromium")
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # It reads from descriptor 3 and writes to 4.
    shell = f'exec 3<&{to_read} 4>&{back_write}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, *options],
        pass_fds=(to_read, back_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(back_write)
    with open(to_write, "wb") as to, open(back_read, "rb") as back:
        try:
            yield Browser(to, back)
        finally:
            process.terminate()
            process.wait(PATIENCE)
