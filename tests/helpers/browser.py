"""A headless Chromium, asked over a pipe, as a person with eyes and a mouse would ask it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from tests.helpers.environment import wait_until
from tests.helpers.patience import PATIENCE

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


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
        """What an expression of JavaScript is worth on the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page, also what is below the window."""
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
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
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
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
