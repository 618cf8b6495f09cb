"""The page in a real Chromium, on a coordinator whose every event the test decides."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_swarm import SPEC, Node, SmallSwarm
from test_rollout_texts import work

from shoal.cli.commands.compare import compare_runs, to_page
from shoal.cli.commands.watch import make_report, read_report
from shoal.net.http_server import Server, listen
from shoal.swarm.coordinator.http.server import RunApp, RunPool
from shoal.wire.lease import Verdict
from shoal.wire.messages import Heartbeat, HeartbeatReply, LeaseStatus
from shoal.wire.page_data import Snapshot
from shoal.wire.run_spec import TaskSpec

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


def test_the_curve_moves_by_itself(swarm: SmallSwarm, page: Any, tmp_path: Path) -> None:
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
    words = page.inner_text("#tokens-words")
    generated, checked, trained = (
        int(re.findall(rf"([\d,]+) {word}", words)[0].replace(",", ""))
        for word in ("generated", "checked", "trained on")
    )
    # small_swarm's reports say 4 forward passes for a trained token.
    assert f"training : inference = 1 : {(generated + checked) / (4 * trained):.2f}" in words
    out = tmp_path / "report.html"
    out.write_text(
        make_report(read_report(str(swarm.dir), threading.Event(), database=swarm.config.database)),
        encoding="utf-8",
    )
    page.goto(out.as_uri())
    page.wait_for_selector("#tokens-words >> text=FLOPs")
    assert page.inner_text("#tokens-words") == words


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
    out.write_text(
        make_report(read_report(str(swarm.dir), threading.Event(), database=swarm.config.database)),
        encoding="utf-8",
    )
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


def test_the_end_of_a_run_is_no_lost_connection(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    node = swarm.node()
    for version in range(1, SPEC.last_version + 1):
        step(swarm, node, version)
    page.goto(swarm.url)
    page.wait_for_selector("#link[data-state=done]")
    swarm.stop_server()
    page.wait_for_selector("#lost", state="visible")
    assert "The run is finished, and its coordinator no longer answers" in page.inner_text("#lost")
    assert page.inner_text("#link") == "finished"


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


def fill_page(swarm: SmallSwarm) -> Node:
    """Gives every part of the page something to show: steps, rollouts, a refusal, a long word."""
    swarm.start()
    node, liar = swarm.node(), swarm.node()
    beat = Heartbeat(epoch=node.epoch, phase="x" * 200)
    node.client.call("POST", "/v1/heartbeat", beat, HeartbeatReply)
    for version in (1, 2):
        step(swarm, node, version)
    for _ in range(2):
        swarm.work(liar, "reject.wrong_computation")
    work_with_sample(swarm, node, "x" * 900)
    work(swarm, node, text="word " * 40, rewards=(0.0, 1.0))
    return node


def overflowing(page: Any) -> list[str]:
    """Returns the elements that are wider than their card, except those that scroll by design."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("section table, section svg, .group pre, .sample, #filters *, dl")]
            .filter((one) => one.getClientRects().length && !one.closest("thead"))
            .filter((one) => {
              const box = (one.closest("section, .group") || document.body).getBoundingClientRect();
              const own = one.getBoundingClientRect();
              return own.left < box.left - 1 || own.right > box.right + 1 || own.right > innerWidth + 1;
            }).map((one) => one.id || one.className.baseVal || one.className || one.tagName)"""
    )
    return found


def colliding(page: Any) -> list[str]:
    """Returns the words of charts that are drawn over other words of the same chart."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll("svg.plot")].flatMap((chart) => {
            const words = [...chart.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect()]);
            return words.filter(([text, box], place) => words.slice(0, place).some(([other, before]) =>
              box.left < before.right - 1 && before.left < box.right - 1 && box.top < before.bottom - 4 && before.top < box.bottom - 4,
            )).map(([text]) => `${chart.id}: ${text}`);
          })"""
    )
    return found


@pytest.mark.parametrize("width", [320, 390, 768, 901, 1400])
def test_it_fits_its_window_by_day_and_by_night(swarm: SmallSwarm, page: Any, width: int) -> None:
    node = fill_page(swarm)
    page.set_viewport_size({"width": width, "height": 700})
    page.goto(swarm.url)
    page.wait_for_selector("#samples .answer")
    for view, ready in (
        ("", "#samples .answer"),
        ("#rollouts", ".group"),
        (f"#node/{node.id}", "#work tbody tr"),
    ):
        page.goto(swarm.url + "/" + view)
        page.wait_for_selector(ready)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert overflowing(page) == [], view
    page.emulate_media(color_scheme="light")
    by_day = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != by_day


@pytest.mark.parametrize("width", [320, 390, 1400])
def test_the_words_of_charts_do_not_collide(swarm: SmallSwarm, page: Any, width: int) -> None:
    fill_page(swarm)
    page.set_viewport_size({"width": width, "height": 700})
    page.goto(swarm.url)
    page.wait_for_selector("#samples .answer")
    for span_s in (3, 9.8, 59, 4000):
        page.evaluate(
            "(span_s) => drawTimeline({ ...state, timeline: { ...state.timeline, span_s } })", span_s
        )
        assert page.locator("#timeline line.grid").count() > 1
        assert colliding(page) == [], span_s


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_errors(swarm: SmallSwarm, page: Any, axe: str, scheme: str, tmp_path: Path) -> None:
    node = fill_page(swarm)
    page.emulate_media(color_scheme=scheme)
    page.goto(swarm.url)
    compare = tmp_path / "compare.html"
    snapshot = Snapshot.parse(swarm.public.get("/v1/page").content)
    rows = compare_runs([snapshot, snapshot])
    compare.write_text(make_report(to_page([snapshot, snapshot], ["one", "two"], rows)), encoding="utf-8")
    for where, ready in (
        (f"{swarm.url}/", "#samples .answer"),
        (f"{swarm.url}/#rollouts", ".group"),
        (f"{swarm.url}/#node/{node.id}", "#work tbody tr"),
        (compare.as_uri(), "#charts svg"),
    ):
        for width in (390, 768, 1400):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(where)
            page.wait_for_selector(ready)
            if details := page.query_selector("details"):
                details.evaluate("one => { one.open = true; }")
            page.evaluate(axe)
            found = page.evaluate("axe.run()")["violations"]
            assert [(one["id"], [node["html"][:150] for node in one["nodes"]]) for one in found] == [], where


def test_empty_states_say_something(swarm: SmallSwarm, page: Any) -> None:
    page.goto(swarm.url)
    page.wait_for_selector("#overview", state="visible")
    for part, words in (
        ("#curve-words", "No step has been trained yet."),
        ("#verdicts-words", "No submission has been checked yet."),
        ("#workers-words", "No worker has joined yet."),
        ("#samples", "No answer has been checked yet."),
        ("#cast-words", "No version has been published yet."),
    ):
        assert page.inner_text(part) == words
    page.goto(swarm.url + "/#rollouts")
    page.wait_for_selector("#rollouts-words >> text=No rollout has been accepted yet.")


def test_the_disk_of_the_trainer_is_shown(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    swarm.fill(swarm.node())
    swarm.batch(0)
    swarm.announce(1)
    page.goto(swarm.url)
    page.wait_for_selector("#cast-words >> text=The trainer's folder takes 5.0 MB of its disk.")


def test_rollouts_are_shown_and_filtered(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    node = swarm.node()
    work(swarm, node, text=INJECTED)
    work(swarm, node, text="needle", rewards=(0.5, 0.25))
    page.goto(swarm.url)
    page.click("#views >> text=Rollouts")
    page.wait_for_selector(".group")
    assert page.locator(".group").count() == 4 and page.locator(".group .sample").count() == 8
    assert INJECTED + "0" in page.inner_text("#groups") and page.evaluate("window.injected") is None
    assert page.title() == "Rollouts · small · Shoal"
    # exp(-0.25) is between 50 and 90 %.
    assert page.locator(".group .t1").count() and not page.locator(".group .t4").count()
    page.fill("#filters [name=reward]", "0.5")
    page.click("#filters button")
    page.wait_for_selector("#rollouts-words >> text=2 groups")
    assert page.url.endswith("#rollouts?reward=0.5")
    page.click(".group details summary")
    assert "z of draws" in page.inner_text(".group details") and "right0" in page.inner_text(".group")
    page.fill("#filters [name=search]", "NEEDLE1")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rollouts-words >> text=1 group")
    page.goto(f"{swarm.url}/#rollouts?version=7")
    page.wait_for_selector("#rollouts-words >> text=No rollout matches these filters")
    page.goto(f"{swarm.url}/#rollouts?held_out=1")
    page.wait_for_selector("#rollouts-words >> text=when the run is finished")


def test_curves_are_zoomed(swarm: SmallSwarm, page: Any) -> None:
    swarm.start()
    node = swarm.node()
    for version in (1, 2, 3, 4):
        step(swarm, node, version)
    page.goto(swarm.url)
    points(page, 4)
    assert "Entropy, nats" in page.inner_text("#charts") and page.locator("#charts svg").count() >= 8
    box = page.locator("#curve").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 50)
    assert page.inner_text("#curve-words").startswith("Version 4: reward 0.500")
    page.mouse.up()
    assert page.inner_text("#zoom-words") == "versions 1 to 4"
    page.click("#zoom-out")
    assert page.inner_text("#zoom-words") == ""
    page.focus("#curve")
    page.keyboard.press("+")
    assert page.inner_text("#zoom-words") != ""
    page.keyboard.press("Escape")
    assert page.inner_text("#zoom-words") == ""


def test_runs_are_compared_in_one_file(swarm: SmallSwarm, page: Any, tmp_path: Path) -> None:
    swarm.start()
    node = swarm.node()
    for version in (1, 2):
        step(swarm, node, version)
    snapshot = Snapshot.parse(swarm.public.get("/v1/page").content)
    out = tmp_path / "compare.html"
    rows = compare_runs([snapshot, snapshot])
    out.write_text(make_report(to_page([snapshot, snapshot], ["before", INJECTED], rows)), encoding="utf-8")
    page.goto(out.as_uri())
    page.wait_for_selector("#charts svg")
    assert page.locator("#curve .smooth").count() == 2 and page.evaluate("window.injected") is None
    assert "reward, last tenth of steps" in page.inner_text("#overview table")
    rows = [[name, *("reverse_words.py:Reverse" for _ in values)] for name, *values in rows]
    out.write_text(make_report(to_page([snapshot, snapshot], ["one", "two"], rows)), encoding="utf-8")
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(out.as_uri())
    page.wait_for_selector("#charts svg")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_tasks_have_their_own_curves(swarm: SmallSwarm, page: Any, tmp_path: Path) -> None:
    swarm.start()
    node = swarm.node()
    for version in (1, 2):
        step(swarm, node, version)
    data = read_report(str(swarm.dir), threading.Event(), database=swarm.config.database)
    part = {"reward": [0.5, 0.6], "accepted_reward": [0.4, None], "groups": [2, 0], "answer_tokens": [3, 4]}
    data["snapshot"]["curve"]["tasks"] = {"sort": part, "count": part | {"accepted_reward": [0.1, 0.2]}}
    data["snapshot"]["evaluations"] = [
        {"version": 0, "reward_mean": mean, "rollouts": 8, "complete": True, "task": task}
        for task, mean in (("sort", 0.25), ("count", 0.75))
    ]
    out = tmp_path / "report.html"
    out.write_text(make_report(data), encoding="utf-8")
    page.goto(out.as_uri())
    page.wait_for_selector("#charts >> text=Pass rate by task")
    assert page.locator("#charts figure").first.locator(".smooth").count() == 2
    assert "held-out, count" in page.inner_text("#curve-legend")
    assert "sort 0.250, count 0.750" in page.inner_text("#figures")
    page.click("#views >> text=Rollouts")
    page.wait_for_selector("#filters [name=task] option >> nth=2", state="attached")
    assert page.locator("#filters [name=task] option").all_inner_texts() == ["all tasks", "sort", "count"]


def test_the_heading_names_the_file(make_file_run: SmallSwarm, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 700})
    page.goto(make_file_run.url)
    page.wait_for_selector("#overview", state="visible")
    assert page.inner_text("#task") == "learning qa, my-questions.jsonl, grader number"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.fixture
def make_file_run(tmp_path: Path) -> Iterator[SmallSwarm]:
    """Yields a run whose task reads a file."""
    file = tmp_path / "my-questions.jsonl"
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(20)]
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    task = TaskSpec(name="qa", options={"path": str(file), "grader": "number"})
    swarm = SmallSwarm(tmp_path / "run", spec=SPEC.model_copy(update={"task": task}), on_socket=True)
    yield swarm
    swarm.close()
