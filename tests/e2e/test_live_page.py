"""The page in a real Chromium beside a whole live run: it learns, a liar is refused, and the coordinator is killed."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from swarm_processes import Swarm

from shoal.cli.commands.watch import make_report, read_report

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

POINTS = "Number(document.querySelector('#curve .smooth')?.dataset.points || 0)"


def wait_for_more(swarm: Swarm, page: Any, points: int) -> int:
    """Waits until the curve has more than `points` points, and returns how many. The page's policy blocks Playwright's own wait."""

    def look() -> int | None:
        found = int(page.evaluate(POINTS))
        return found if found > points else None

    return int(swarm.wait_for(f"more than {points} points of the curve", look))


def test_the_page_of_a_live_run(tmp_path: Path, page: Any) -> None:
    page.set_default_timeout(180_000)  # eight processes and a browser, perhaps on two cores that others use
    with Swarm(tmp_path, last_version=40, lies=["wrong-weights"]) as swarm:
        swarm.wait_for_version(1)
        page.goto(swarm.url)
        wait_for_more(swarm, page, wait_for_more(swarm, page, 0))

        reason = "the proofs do not match the leased model on these tokens"
        page.wait_for_selector(f"#workers >> text={reason}")
        page.wait_for_selector(f"#verdicts >> text={reason}")
        page.click(f"#workers tr:has-text('{reason}') a")
        page.wait_for_selector(f"#work >> text={reason}")
        assert "exponents" in page.inner_text("#work")
        page.go_back()

        page.wait_for_selector("#samples .answer")
        assert re.fullmatch(r"[0-9]+=", page.inner_text("#samples .prompt >> nth=0").strip())
        for stage in ("generate", "upload", "check", "train", "broadcast"):
            page.wait_for_selector(f"#timeline .bar.{stage}", state="attached")

        swarm.kill("coordinator")
        page.wait_for_selector("#lost", state="visible")
        page.wait_for_selector("#lost", state="hidden")
        wait_for_more(swarm, page, page.evaluate(POINTS))

        live = read_report(swarm.url, threading.Event())
        assert len(live["nodes"]) == 3
    out = tmp_path / "report.html"
    out.write_text(make_report(read_report(str(swarm.folder), threading.Event())), encoding="utf-8")
    page.goto(out.as_uri())
    page.wait_for_selector(f"#workers >> text={reason}")
