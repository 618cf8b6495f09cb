"""The page's data and its events: content of a snapshot, when snapshots are taken, and the limit of viewers."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from small_swarm import LOG, Node, SmallSwarm, report

from shoal.cli.commands.watch import make_report, read_report
from shoal.net.waiting import NotYet, wait_for
from shoal.swarm.coordinator.http import live_page as feed_module
from shoal.swarm.coordinator.http.live_page import PAGE_FILES, Feed, page_file
from shoal.swarm.coordinator.views import page_snapshot as snapshot_module
from shoal.swarm.coordinator.views import timeline as timeline_module
from shoal.swarm.coordinator.views.page_snapshot import make_curve
from shoal.wire.codes import Rejected
from shoal.wire.lease import Verdict
from shoal.wire.messages import LeaseStatus, ProblemDetails
from shoal.wire.page_data import NodePage, Snapshot


def take(swarm: SmallSwarm) -> Snapshot:
    """Takes a new snapshot, so that it includes what the test has just done."""
    swarm_feed(swarm)._next_s = float("-inf")
    return Snapshot.parse(swarm.public.get("/v1/page").raise_for_status().content)


def swarm_feed(swarm: SmallSwarm) -> Feed:
    return swarm.app.feed


def step(swarm: SmallSwarm, node: Node, version: int) -> None:
    swarm.fill(node)
    swarm.batch(version - 1)
    swarm.announce(version)


def test_a_run_that_has_not_begun(swarm: SmallSwarm) -> None:
    seen = take(swarm)
    assert (seen.now.newest_version, seen.curve.version, seen.timeline.spans) == (None, (), ())
    assert seen.terms.run == "small" and seen.head is not None and seen.head.type == "run.opened"


def test_a_snapshot_has_all_sections(swarm: SmallSwarm) -> None:
    swarm.start()
    honest, liar = swarm.node(), swarm.node()
    step(swarm, honest, 1)
    swarm.work(liar, "reject.forged_proof")
    honest.deliver()
    seen = take(swarm)
    assert (seen.now.newest_version, seen.curve.version, seen.curve.reward) == (1, (1,), (0.5,))
    assert [(one.code, one.count) for one in seen.verdicts] == [("accepted", 2), ("reject.forged_proof", 1)]
    words = {one.node: one.words for one in seen.workers}
    assert words == {
        honest.id: "checked and accepted",
        liar.id: "a proof was not made from any hidden states",
    }
    assert seen.workers[0].node == honest.id and seen.workers[0].verified_tokens_per_s > 0
    assert [(one.version, one.num_bytes) for one in seen.releases] == [(0, 1000), (1, 1000)]
    assert seen.relays[0].bytes_sent == 7
    stages = {(span.stage, span.lane) for span in seen.timeline.spans}
    assert stages >= {("generate", honest.id), ("check", "validator"), ("train", "trainer")}
    assert ("queue", "validator") in stages
    assert all(-seen.timeline.span_s <= span.start_s <= span.end_s <= 0 for span in seen.timeline.spans)


def test_tokens_are_those_of_the_ledger(swarm: SmallSwarm) -> None:
    swarm.start()
    step(swarm, swarm.node(), 1)
    swarm.work(swarm.node(), "reject.forged_proof")
    found = take(swarm).now.tokens
    accepted = [event.body for event in swarm.events("verdict.given") if event.body["code"] == "accepted"]
    trained = {group for event in swarm.events("batch.formed") for group in event.body["group_ids"]}
    assert found is not None and trained
    assert found.generated == sum(body["output_tokens"] for body in accepted) > 0
    assert found.trained + found.dropped + found.unused == found.generated - found.held_out
    assert 0 < found.trained <= found.generated
    assert found.checked <= found.generated
    assert take(swarm).now.train_passes == 4


def test_the_disk_of_the_trainer_is_shown(swarm: SmallSwarm) -> None:
    swarm.start()
    step(swarm, swarm.node(), 1)
    assert take(swarm).now.trainer_disk_bytes == 5_000_000


def test_the_last_whole_step_is_shown_however_long_it_is(
    swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_module, "LONGEST_S", 1e-3)
    swarm.start()
    node = swarm.node()
    step(swarm, node, 1)
    step(swarm, node, 2)
    spans = take(swarm).timeline.spans
    assert {span.version for span in spans if span.lane == "trainer" and span.stage == "train"} == {2}


def test_a_node_has_a_page(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    swarm.work(node)
    swarm.work(node, "reject.early_stop")
    page = NodePage.parse(swarm.public.get(f"/v1/nodes/{node.id}/page").raise_for_status().content)
    assert page.trust_reason.startswith("a submission was refused, the last because an answer ends")
    assert [item.code for item in page.work] == ["reject.early_stop", "accepted"]
    assert page.work[0].detail == "because" and page.work[1].credit == page.node.credit > 0
    for unknown in ("0" * 64, "<script>"):
        answer = swarm.public.get(f"/v1/nodes/{unknown}/page")
        assert (answer.status_code, ProblemDetails.parse(answer.content).code) == (404, "request.not_found")


def give_sample(swarm: SmallSwarm, node: Node, **evidence: Any) -> None:
    lease = node.deliver()
    swarm.claim()
    verdict = Verdict(
        lease_id=lease.lease_id,
        code="accepted",
        detail="fine",
        rewards=(0.0, 1.0) * (lease.num_rows // 2),
        output_tokens=lease.num_rows,
        evidence=evidence,
    )
    swarm.validator.call("POST", f"/v1/checks/{lease.lease_id}/verdict", verdict, LeaseStatus)


def test_samples_have_the_prompt_of_the_lease(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    give_sample(swarm, node, sample_prompt=1, sample_answer="1234", sample_reward=0.5)
    seen = take(swarm).samples
    assert [(one.answer, one.reward, one.node, one.policy_version) for one in seen] == [
        ("1234", 0.5, node.id, 0)
    ]
    assert seen[0].prompt.endswith("=")


@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"sample_prompt": 7, "sample_answer": "x", "sample_reward": 1.0},
        {"sample_prompt": "0", "sample_answer": "x", "sample_reward": 1.0},
        {"sample_prompt": 0, "sample_answer": 3, "sample_reward": 1.0},
    ],
)
def test_evidence_without_a_valid_sample_is_skipped(swarm: SmallSwarm, evidence: dict[str, Any]) -> None:
    swarm.start()
    give_sample(swarm, swarm.node(), **evidence)
    assert take(swarm).samples == ()


def test_a_long_curve_is_averaged() -> None:
    steps = [report(version) for version in range(1, 1001)]
    curve = make_curve(steps)
    assert curve.steps_per_point == 4 and len(curve.version) == 250 <= snapshot_module.MAX_POINTS
    assert curve.version[-1] == 1000 and set(curve.reward) == {0.5}
    assert make_curve([]).version == ()


# -- the feed ---------------------------------------------------------------------------------------------


class Viewer:
    """Reads events as a browser does."""

    def __init__(self, url: str) -> None:
        self._exits = ExitStack()
        http = self._exits.enter_context(
            httpx2.Client(base_url=url, timeout=30, transport=httpx2.HTTPTransport(verify=False))
        )
        self.answer = self._exits.enter_context(http.stream("GET", "/v1/events"))
        self._lines = self.answer.iter_lines()

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    def next(self) -> dict[str, Any]:
        return next(self.events())

    def close(self) -> None:
        self._exits.close()


@pytest.fixture
def viewers(swarm: SmallSwarm) -> Iterator[list[Viewer]]:
    opened: list[Viewer] = []
    yield opened
    for viewer in opened:
        viewer.close()


@pytest.mark.on_socket
def test_the_first_event_has_all_sections_and_later_ones_the_changed_ones(
    swarm: SmallSwarm, viewers: list[Viewer]
) -> None:
    swarm.start()
    node = swarm.node()
    viewers.append(Viewer(swarm.url))
    viewer = viewers[0]
    assert viewer.answer.headers["content-type"].startswith("text/event-stream")
    assert viewer.answer.headers["x-accel-buffering"] == "no"
    first = viewer.next()
    Snapshot.parse(json.dumps(first))
    step(swarm, node, 1)
    later: dict[str, Any] = {}
    for event in viewer.events():
        assert "terms" not in event, "what did not change is not sent again"
        later |= event
        if later.get("curve", {}).get("version") == [1]:
            break
    Snapshot.parse(json.dumps(first | later))


@pytest.mark.on_socket
def test_ten_viewers_cost_one_snapshot(swarm: SmallSwarm, viewers: list[Viewer]) -> None:
    swarm.start()
    began_s = time.monotonic()
    viewers += [Viewer(swarm.url) for _ in range(10)]
    for viewer in viewers:
        for _ in range(3):
            viewer.next()
    feed = swarm_feed(swarm)
    taken, periods = feed.snapshots, (time.monotonic() - began_s) / feed_module.PERIOD_S
    assert feed.viewers == 10
    # About one per period; on an idle machine 3 for the 30 events that were read.
    assert taken <= 2 + periods * 1.05


@pytest.mark.on_socket
def test_without_viewers_no_snapshot_is_taken(swarm: SmallSwarm) -> None:
    viewer = Viewer(swarm.url)
    viewer.next()
    viewer.close()
    feed = swarm_feed(swarm)
    wait_until(lambda: feed.viewers == 0)
    taken = feed.snapshots
    threading.Event().wait(2.5)
    assert feed.snapshots == taken


@pytest.mark.on_socket
def test_the_number_of_viewers_is_limited(
    swarm: SmallSwarm, viewers: list[Viewer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 2)
    viewers += [Viewer(swarm.url) for _ in range(2)]
    refused = swarm.public.get("/v1/events")
    assert (refused.status_code, ProblemDetails.parse(refused.content).code) == (429, "request.too_many")
    viewers.pop().close()
    wait_until(lambda: swarm_feed(swarm).viewers < 2)
    viewers.append(Viewer(swarm.url))
    assert viewers[-1].next()["now"]


def test_one_address_cannot_take_every_event_stream(swarm: SmallSwarm) -> None:
    feed = swarm_feed(swarm)
    with ExitStack() as streams:
        for _ in range(feed_module.VIEWERS_PER_ADDRESS):
            streams.enter_context(feed.count_viewer("192.0.2.1"))
        with pytest.raises(Rejected, match="viewers of your address"):
            streams.enter_context(feed.count_viewer("192.0.2.1"))
        streams.enter_context(feed.count_viewer("192.0.2.2"))
    streams.enter_context(feed.count_viewer("192.0.2.1"))


def test_a_few_addresses_cannot_take_all_event_streams(
    swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 8)
    feed = swarm_feed(swarm)
    with ExitStack() as streams:
        taken = [streams.enter_context(feed.count_viewer(f"192.0.2.{number % 2}")) for number in range(8)]
        honest = [streams.enter_context(feed.count_viewer(f"198.51.100.{number}")) for number in range(6)]
        assert feed.viewers == 8
        # One stream is left for each address, and none has fewer than another could have.
        assert [viewer.ended for viewer in taken].count(False) == 2
        assert not any(viewer.ended for viewer in honest)
        with pytest.raises(Rejected, match="8 viewers"):
            streams.enter_context(feed.count_viewer("203.0.113.1"))
    assert feed.viewers == 0


@pytest.mark.on_socket
def test_the_stream_of_a_viewer_that_gave_way_ends(swarm: SmallSwarm, viewers: list[Viewer]) -> None:
    viewers.append(Viewer(swarm.url))
    assert viewers[0].next()["now"]
    feed = swarm_feed(swarm)
    (seats,) = feed._by_address.values()
    feed._end(seats[0])
    assert feed.viewers == 0
    with pytest.raises(StopIteration):
        for _ in range(100):
            viewers[0].next()


def test_a_slow_snapshot_is_taken_less_often(swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "SHARE", 1e-9)
    swarm.public.get("/v1/page").raise_for_status()
    swarm.public.get("/v1/page").raise_for_status()
    feed = swarm_feed(swarm)
    assert feed.snapshots == 1
    assert feed._next_s - time.monotonic() > feed_module.LONGEST_PERIOD_S / 2


@pytest.mark.on_socket
def test_a_stopping_server_ends_the_event_streams(swarm: SmallSwarm, viewers: list[Viewer]) -> None:
    viewers.append(Viewer(swarm.url))
    viewers[0].next()
    swarm.stop_server()
    # The stream ends; a connection that was cut would raise.
    assert len(list(viewers[0].events())) <= 1


def wait_until(look: Callable[[], bool]) -> None:
    def attempt() -> None:
        if not look():
            raise NotYet("the feed has not noticed")

    wait_for("the feed", attempt, deadline_s=30, log=LOG, stop=threading.Event())


# -- the files --------------------------------------------------------------------------------------------


def test_the_page_is_small_and_loads_only_its_own_files(swarm: SmallSwarm) -> None:
    swarm.start()
    step(swarm, swarm.node(), 1)
    total = len(swarm.public.get("/v1/page").content)
    for path in PAGE_FILES:
        answer = swarm.public.get(path).raise_for_status()
        total += len(answer.content)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        again = swarm.public.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert total < 100_000
    html, script = page_file("page.html").decode(), page_file("page.js").decode()
    assert (
        "<script>" not in html
        and "style=" not in html
        and "http://" not in html.replace("http://www.w3.org", "")
    )
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in script


@pytest.mark.on_socket
def test_a_report_is_one_file(swarm: SmallSwarm, tmp_path: Path) -> None:
    swarm.start()
    node = swarm.node()
    injected = "</script><script>alert(1)</script><!--"
    give_sample(swarm, node, sample_prompt=0, sample_answer=injected, sample_reward=1.0)
    text = make_report(read_report(str(swarm.dir), threading.Event(), database=swarm.config.database))
    assert injected not in text and "alert(1)</" not in text
    assert text.count("</script>") == 4 and 'src="' not in text and 'rel="stylesheet"' not in text
    body = text.split('id="data">')[1].split("</script>")[0]
    data = json.loads(body)
    assert data["snapshot"]["samples"][0]["answer"] == injected
    assert data["nodes"][node.id]["work"][0]["code"] == "accepted"
    assert read_report(swarm.url, threading.Event())["nodes"].keys() == data["nodes"].keys()


def test_a_report_of_a_folder_without_a_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        read_report(str(tmp_path), threading.Event())
