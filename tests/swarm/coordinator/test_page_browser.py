"""The page in a real Chromium, on a coordinator whose every event the test decides."""

from pathlib import Path
from typing import Any

import pytest
from small_swarm import Node, SmallSwarm

from shoal.cli.commands.watch import make_report, read_folder
from shoal.net.http_server import Server, listen
from shoal.swarm.coordinator.http.server import RunApp, RunPool
from shoal.wire.lease import Verdict
from shoal.wire.messages import Heartbeat, HeartbeatReply, LeaseStatus

pytestmark = [pytest.mark.browser, pytest.mark.on_socket, pytest.mark.timeout(400)]

INJECTED = "</script><script>window.injected = 1</script><img src=x onerror='window.injected = 2'>"


def step(swarm: SmallSwarm, node: Node, version: int) -> None:
    """Delivers work, forms a batch and announces the next version."""
    swarm.fill(node)
    swarm.batch(version - 1)
    swarm.announce(version)


def work_with_sample(swarm: SmallSwarm, node: Node, answer: str) -> None:
    lease = node.deliver()
    swarm.claim()
    verdict = Verdict(
        lease_id=lease.lease_id,
        code="accepted",
        detail="fine",
        rewards=(0.0, 1.0) * (lease.num_rows // 2),
        output_tokens=3 * lease.num_rows,
        evidence={"sample_prompt": 0, "sample_answer": answer, "sample_reward": 1.0},
    )
    swarm.validator.call("POST", f"/v1/checks/{lease.lease_id}/verdict", verdict, LeaseStatus)


def points(page: Any, count: int) -> None:
    page.wait_for_selector(f'#curve .smooth[data-points="{count}"]', state="attached")


def test_the_curve_moves_by_itself(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    node = swarm.node()
    step(swarm, node, 1)
    page.goto(swarm.url)
    points(page, 1)
    step(swarm, node, 2)
    points(page, 2)
    assert page.inner_text("#figures >> text=2 / 4") == "2 / 4"
    assert page.get_attribute("#link", "data-state") == "live"
    assert page.locator("#timeline .bar.train").count() == 2


def test_a_refusal_appears_with_its_reason(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    liar = swarm.node()
    page.goto(swarm.url)
    page.wait_for_selector(f'#workers a[href="#node/{liar.id}"]')
    swarm.work(liar, "reject.wrong_computation")
    swarm.work(liar, "reject.wrong_computation")
    reason = "the proofs do not match the leased model on these tokens"
    page.wait_for_selector(f"#workers >> text={reason}")
    page.wait_for_selector("#workers >> text=ejected")
    assert page.inner_text("#verdicts .refused .count") == "2"
    page.click("#workers a")
    page.wait_for_selector("#work >> text=because")
    assert "2 submissions were refused" in page.inner_text("#node-words")


def test_a_node_page_opens_by_keyboard(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    node = swarm.node()
    step(swarm, node, 1)
    page.goto(swarm.url)
    points(page, 1)
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.getAttribute('href')")
        )
        if reached[-1] == f"#node/{node.id}":
            break
    assert "curve" in reached and reached[-1] == f"#node/{node.id}"
    page.keyboard.press("Enter")
    page.wait_for_selector("#work tbody tr")
    assert page.inner_text("#node-title") == node.id
    assert page.evaluate("document.activeElement.id") == "node-title"
    page.keyboard.press("Tab")
    page.go_back()
    page.wait_for_selector("#overview", state="visible")


def test_the_curve_is_read_by_keyboard(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    step(swarm, swarm.node(), 1)
    page.goto(swarm.url)
    points(page, 1)
    page.focus("#curve")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#curve-words").startswith("Version 1: reward 0.500")


def test_untrusted_text_is_never_markup(swarm: SmallSwarm, page: Any, tmp_path: Path) -> None:
    swarm.start()
    node = swarm.node()
    beat = Heartbeat(epoch=node.epoch, phase=INJECTED)
    node.client.call("POST", "/v1/heartbeat", beat, HeartbeatReply)
    work_with_sample(swarm, node, INJECTED)
    page.goto(swarm.url)
    page.wait_for_selector("#samples .answer")
    assert page.inner_text("#samples .answer") == INJECTED
    assert INJECTED in page.inner_text("#workers")
    page.click("#workers a")
    page.wait_for_selector("#node-samples .answer")
    assert page.evaluate("window.injected") is None

    out = tmp_path / "report.html"
    out.write_text(make_report(read_folder(swarm.dir, swarm.config.database)), encoding="utf-8")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(out.as_uri())
    page.wait_for_selector("#samples .answer")
    assert page.inner_text("#samples .answer") == INJECTED
    page.click("#workers a")
    page.wait_for_selector("#work tbody tr")
    assert page.evaluate("window.injected") is None
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_the_page_survives_a_restart(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    node = swarm.node()
    step(swarm, node, 1)
    page.goto(swarm.url)
    points(page, 1)
    swarm.stop_server()
    page.wait_for_selector("#lost", state="visible")
    assert "has not answered since" in page.inner_text("#lost")
    assert page.get_attribute("#link", "data-state") == "lost"
    swarm.reopen()
    page.wait_for_selector("#lost", state="hidden")
    step(swarm, node, 2)
    points(page, 2)


def test_it_works_under_a_prefix(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    node = swarm.node()
    pool = RunPool([RunApp(swarm.coordinator)])
    server = Server(pool, listen("127.0.0.1", 0), on_close=pool.close_feeds)
    server.start()
    try:
        page.goto(f"http://127.0.0.1:{server.port}/runs/small/")
        page.click(f'#workers a[href="#node/{node.id}"]')
        page.wait_for_selector("#node-figures dd")
    finally:
        server.close()


@pytest.mark.parametrize("width", [320, 390, 800])
def test_it_fits_its_window_by_day_and_by_night(swarm: SmallSwarm, page: Any, width: int) -> None:
    swarm.start()
    node = swarm.node()
    step(swarm, node, 1)
    work_with_sample(swarm, node, "x" * 900)
    page.set_viewport_size({"width": width, "height": 700})
    page.goto(swarm.url)
    page.wait_for_selector("#samples .answer")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # The last verdict is inside the visible part of the page.
    box = page.locator("#workers td.wide").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width
    page.emulate_media(color_scheme="light")
    by_day = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != by_day
