"""Draws the pictures of the README from a real run: the terminal of `shoal demo` as SVG, and its page as PNG.

    pip install pyte playwright; python bench/pictures.py [--at 60]

`shoal demo` runs at a pseudo-terminal. When the version of --at appears, the screen is written to docs/img/terminal.svg and the page to
docs/img/page.png; then the demo is stopped.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
COLUMNS, ROWS = 128, 32
IMAGES = ROOT / "docs" / "img"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", type=int, default=60, metavar="VERSION")
    parser.add_argument("--deadline-s", type=float, default=900.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), options.at, options.deadline_s)


def record(folder: Path, version: int, deadline_s: float) -> None:
    """Runs the demo in `folder` until `version` is shown, and writes both pictures."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {
        "TERM": "xterm-256color",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": str(COLUMNS),
    }
    demo = subprocess.Popen(
        [sys.executable, "-m", "shoal", "demo"],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    give_up_s, url = time.monotonic() + deadline_s, ""
    try:
        while time.monotonic() < give_up_s and demo.poll() is None:
            if select.select([ours], [], [], 1.0)[0]:
                stream.feed(os.read(ours, 65536))
            shown = "\n".join(screen.display)
            if found := re.search(r"http://127\.0\.0\.1:\d+", shown):
                url = url or found[0]
            newest = re.search(r"version (\d+)/", shown)
            if newest and int(newest[1]) >= version:
                write_terminal(screen)
                if url:
                    write_page(url)
                return
        sys.exit(f"version {version} did not appear:\n" + "\n".join(screen.display))
    finally:
        demo.send_signal(signal.SIGINT)
        end_s = time.monotonic() + 60
        while demo.poll() is None and time.monotonic() < end_s:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    os.read(ours, 65536)
                except OSError:
                    break
        demo.kill()
        demo.wait()
        os.close(ours)


def write_terminal(screen: pyte.Screen) -> None:
    """Writes the screen as SVG. Rows above the first text and below the last are left out."""
    rows = [row.rstrip() for row in screen.display]
    filled = [at for at, row in enumerate(rows) if row]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ shoal demo", style="bold"))
    for at in range(filled[0], filled[-1] + 1):
        line = Text()
        for column in range(COLUMNS):
            cell = screen.buffer[at][column]
            color = (
                ""
                if cell.fg == "default"
                else f"#{cell.fg}"
                if re.fullmatch(r"[0-9a-f]{6}", cell.fg)
                else cell.fg
            )
            line.append(cell.data, style=" ".join(filter(None, ["bold" if cell.bold else "", color])))
        line.rstrip()
        console.print(line, no_wrap=True, crop=True)
    drawing = console.export_svg(title="shoal demo")
    # Without the fonts that rich names, which would be requested from another server.
    drawing = re.sub(r"\s*@font-face \{.*?\}", "", drawing, flags=re.DOTALL)
    (IMAGES / "terminal.svg").write_text(drawing, encoding="utf-8")


def write_page(url: str) -> None:
    """Writes a picture of the live page."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(url)
        page.wait_for_timeout(4000)
        page.screenshot(path=IMAGES / "page.png")
        browser.close()


if __name__ == "__main__":
    main()
