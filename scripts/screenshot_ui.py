"""Screenshots of a run in the Prefect UI by headless Chromium: `python -m scripts.screenshot_ui RUN --out docs/images`.

Chromium (Debian package `chromium`) runs with a profile of its own and is driven over its debugging port: the UI
is a single page that draws itself after it has loaded, so the script waits until the text it expects is on the page.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from infra import services
from torchspec_core.errors import StageError, UserError
from torchspec_core.processes import Supervised

FLAGS = (
    "--headless", "--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader", "--remote-debugging-port=0", "--remote-allow-origins=*",
)


class Page:
    """One tab of a running Chromium."""

    def __init__(self, socket: Connection) -> None:
        self._socket, self._ids = socket, itertools.count(1)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=30))
            if answer.get("id") == number:
                if "error" in answer:
                    raise StageError(f"Chromium refused {method}: {answer['error']['message']}")
                return dict(answer["result"])

    def text(self) -> str:
        """The text that a reader of the page sees."""
        found = self.send("Runtime.evaluate", expression="document.body ? document.body.innerText : ''")
        return str(found["result"].get("value", ""))

    def open(self, url: str, words: str, seconds: float) -> None:
        """Go to `url` and wait until `words` are on the page and its pictures have settled."""
        self.send("Page.navigate", url=url)
        deadline = time.monotonic() + seconds
        while words not in self.text():
            if time.monotonic() > deadline:
                raise StageError(f"{url} does not show {words!r} after {seconds:g} s")
            time.sleep(0.2)
        time.sleep(3.0)

    def click(self, words: str) -> None:
        """Click the innermost element whose whole text is `words`, with the mouse: its tabs obey nothing else."""
        script = (
            "(() => { const e = [...document.querySelectorAll('*')].filter(e => e.innerText?.trim() === WORDS).pop();"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        ).replace("WORDS", json.dumps(words))
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)["result"]
        x, y = found["value"]
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        time.sleep(3.0)

    def save(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


def _socket_address(profile: Path, chromium: Supervised) -> str:
    port_file = profile / "DevToolsActivePort"
    chromium.wait_ready(lambda: port_file.is_file() and bool(port_file.read_text().strip()), deadline_s=30)
    port = port_file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
        return str(next(tab for tab in json.loads(answer.read()) if tab["type"] == "page")["webSocketDebuggerUrl"])


def _first_id(api: str, kind: str, **wanted: Any) -> str:
    body = json.dumps({"limit": 1, **wanted}).encode()
    request = urllib.request.Request(f"{api}/{kind}/filter", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        found = json.loads(answer.read())
    if not found:
        raise UserError(f"the server at {api} has no completed run with a report; `make demo` makes one")
    return str(found[0]["id"])


def newest_run(api: str) -> str:
    """Id of the newest completed run."""
    return _first_id(api, "flow_runs", sort="END_TIME_DESC", flow_runs={"state": {"type": {"any_": ["COMPLETED"]}}})


def report_of(api: str, run: str) -> str:
    """Id of the run's report artifact."""
    return _first_id(api, "artifacts", flow_runs={"id": {"any_": [run]}}, artifacts={"key": {"any_": ["report"]}})


def shoot(ui: str, run: str, report: str, out: Path, width: int, height: int) -> list[Path]:
    """Save the run's page (its graph), its artifacts and its report; returns the files."""
    if shutil.which("chromium") is None:
        raise UserError("chromium is not installed; install it with `apt-get install -y chromium`")
    files = [out / f"{name}.png" for name in ("run", "artifacts", "report")]
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder)
        command = ["chromium", *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        with Supervised(command, log=profile / "chromium.log", deadline_s=300, grace_s=3) as chromium:
            with connect(_socket_address(profile, chromium), max_size=None, proxy=None) as socket:
                page = Page(socket)
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                page.send("Emulation.setDeviceMetricsOverride", **size)
                page.open(f"{ui}/runs/flow-run/{run}", "Task Runs", 60)
                page.save(files[0])
                page.click("Artifacts")
                page.save(files[1])
                page.open(f"{ui}/artifacts/artifact/{report}", "report.html", 60)
                page.save(files[2])
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.screenshot_ui", description=__doc__)
    parser.add_argument("run", nargs="?", help="id of a flow run; none = the newest that completed")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--size", default="1440x1000", help="WIDTHxHEIGHT of the window")
    args = parser.parse_args(argv)
    width, height = (int(part) for part in args.size.split("x"))
    place = services.locate(os.environ)
    try:
        if not services.healthy(place.api):
            raise UserError(f"no Prefect server answers at {place.api}; start it with `python -m infra.local up`")
        run = args.run or newest_run(place.api)
        for file in shoot(place.ui, run, report_of(place.api, run), args.out, width, height):
            print(file)
    except UserError as error:
        print(f"torchspec: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
