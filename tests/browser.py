"""A real headless Chromium, driven over its own debugging pipe; no other package is needed.

Protocol: https://chromedevtools.github.io/devtools-protocol
"""

import base64
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60


def find_browser():
    """CHROMIUM from the environment, or the first that the search path holds; None without any."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. Use it in a with statement."""

    def __init__(self, program):
        self.profile = tempfile.mkdtemp(prefix="tprimat-browser-")
        to_child, self.out = os.pipe()
        self.into, from_child = os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions --hide-scrollbars"
        )
        command = [program, *flags.split(), f"--user-data-dir={self.profile}", "--remote-debugging-pipe", "about:blank"]
        # The pipe must have the numbers 3 and 4 in the browser.
        line = f"exec {shlex.join(command)} 3<&{to_child} 4>&{from_child}"
        self.process = subprocess.Popen(
            ["bash", "-c", line], pass_fds=(to_child, from_child), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_child)
        os.close(from_child)
        self.sent, self.rest, self.session = 0, b"", None
        self.errors, self.requests, self.loaded = [], [], False

    def __enter__(self):
        pages = [target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        os.close(self.out)
        os.close(self.into)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, **parameters):
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.sent:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._keep(answer)

    def _read(self):
        while b"\0" not in self.rest:
            part = os.read(self.into, 1 << 20)
            assert part, "the browser has ended"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _keep(self, event):
        details = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(details["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Log.entryAdded" if details["entry"]["level"] in {"error", "warning"}:
                self.errors.append(details["entry"]["text"])
            case "Runtime.consoleAPICalled" if details["type"] in {"error", "warning", "assert"}:
                self.errors.append(json.dumps(details["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])
            case "Page.loadEventFired":
                self.loaded = True

    def run(self, script):
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition):
        """Until an expression is true."""
        end = time.monotonic() + SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} did not become true"
            time.sleep(0.02)

    def size(self, width, height=900):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, path):
        self.errors.clear()
        self.requests.clear()
        self.loaded = False
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while not self.loaded:  # document.readyState may still tell of the page before
            self._keep(self._read())

    def fill(self, selector, value):
        """As if a user had typed or chosen it."""
        self.run(
            f"(field => {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def picture(self, path):
        box = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": box["width"], "height": min(box["height"], 16000), "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        Path(path).write_bytes(base64.b64decode(data))
