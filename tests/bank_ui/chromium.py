"""A real browser for tests: Chromium without a window, driven over its DevTools protocol with aiohttp's client."""

import asyncio
import base64
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One tab. `logs` holds what the page complained about: exceptions, console errors, refused resources."""

    def __init__(self, socket):
        self._socket, self._number, self._waiting = socket, 0, {}
        self.logs: list[str] = []
        self._task = asyncio.create_task(self._listen())

    async def _listen(self):
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                future = self._waiting.pop(data["id"], None)
                if future is not None and not future.done():
                    future.set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.logs.append(json.dumps(data["params"]["exceptionDetails"])[:600])
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["level"] == "error":
                self.logs.append(f"{data['params']['entry']['text']} {data['params']['entry'].get('url', '')}")
            elif data["method"] == "Runtime.consoleAPICalled" and data["params"]["type"] == "error":
                self.logs.append(str(data["params"]["args"]))

    async def send(self, method, **params):
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": self._number, "method": method, "params": params}))
        answer = await asyncio.wait_for(future, 30)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    async def js(self, expression):
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, expression, what="", timeout_s=20.0):
        """Wait until an expression is true."""
        end = asyncio.get_running_loop().time() + timeout_s
        while not (value := await self.js(f"!!({expression})")):
            if asyncio.get_running_loop().time() > end:
                shown = await self.js("document.getElementById('main')?.innerText?.slice(0, 600)")
                raise AssertionError(f"waited for {what or expression}; the page shows {shown!r}, its log {self.logs}")
            await asyncio.sleep(0.03)
        return value

    async def open(self, url):
        await self.send("Page.navigate", url=url)

    async def key(self, key, *, code=None, shift=False):
        """Press and release one key."""
        text = {"Enter": "\r", "Space": " "}.get(key, key if len(key) == 1 else "")
        number = {
            "Enter": 13,
            "Tab": 9,
            "Escape": 27,
            "ArrowDown": 40,
            "ArrowUp": 38,
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "Home": 36,
            "End": 35,
        }
        common = {"key": key, "code": code or key, "windowsVirtualKeyCode": number.get(key, ord(key.upper()) if len(key) == 1 else 0)}
        common["modifiers"] = 8 if shift else 0
        await self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def write(self, text):
        await self.send("Input.insertText", text=text)

    async def look(self, *, width=1280, height=900, dark=False):
        """The size of the window and the colour scheme."""
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    async def shot(self, path, *, whole=False):
        done = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        pathlib.Path(path).write_bytes(base64.b64decode(done["data"]))

    async def close(self):
        self._task.cancel()
        await self._socket.close()


@contextlib.asynccontextmanager
async def browser(program):
    """A started Chromium with one page; it is ended with its helpers, and its profile removed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        port_file = pathlib.Path(profile) / "DevToolsActivePort"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--force-prefers-reduced-motion", "about:blank"]
        process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            for _ in range(600):
                if port_file.exists() and port_file.read_text().count("\n"):
                    break
                await asyncio.sleep(0.05)
            port = port_file.read_text().split("\n")[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    target = next(t for t in await answer.json() if t["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.send(f"{domain}.enable")
                    await page.send("Emulation.setFocusEmulationEnabled", enabled=True)
                    yield page
                    await page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
