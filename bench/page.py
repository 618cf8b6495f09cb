"""What the page of a large run costs: bytes to the first paint, time in a browser, and processor time of the coordinator.

    python bench/page.py --nodes 1000 --versions 10000        # a run made for this, in Chromium if there is one

    shoal coordinator runs/demo.toml --dir out/demo/coordinator --port 8700 &
    python bench/page.py http://127.0.0.1:8700 $! --viewers 10

The second form compares the processor time with and without viewers, in turns: a coordinator that serves a live run does other
work too, and the turns tell the two apart.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
from sqlalchemy import insert

from shoal.net.http_server import Server, listen
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.context import Coordinator, open_coordinator
from shoal.swarm.coordinator.http.live_page import PAGE_FILES
from shoal.swarm.coordinator.http.server import RunApp
from shoal.swarm.coordinator.store.schema import nodes, policies
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.messages import StepReport
from shoal.wire.record import seal
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec

# -- a large run --------------------------------------------------------------------------------------------


def make_report(version: int) -> StepReport:
    noise = (version * 2654435761 % 1000) / 1000
    return StepReport(
        version=version,
        loss=noise / 10,
        reward_mean=min(1.0, version / 10_000 + noise / 10),
        groups=16,
        dropped_groups=3,
        rollouts=256,
        tokens=100_000,
        lag_mean=1.5,
        lag_max=2,
        grad_norm=1 + noise,
        clip_fraction=noise / 50,
        logprob_gap=0.001,
        learning_rate=1e-6,
        wait_s=noise,
        train_s=3 + noise,
        tokens_per_s=30_000 + 1000 * noise,
        entropy=1 - version / 20_000 + noise / 20,
        answer_tokens_mean=400 + 100 * noise,
        dropped_share=noise / 2,
        generate_s=20 + noise,
        check_s=1 + noise,
        kl=version / 1e5,
    )


def fill(coordinator: Coordinator, key: Key, num_nodes: int, num_versions: int) -> None:
    """Writes nodes and versions into the tables, as if the run had gone on for a long time."""
    now_s = coordinator.clock()
    entry = FileEntry(
        name="model.safetensors", num_bytes=10**9, blake3="0" * 64, shard_bytes=10**9, shards=("0" * 64,)
    )
    with coordinator.transaction() as tx:
        for version in range(num_versions + 1):
            manifest = Manifest(run=coordinator.spec.run, version=version, files=(entry,), created_at_s=now_s)
            sealed = seal(manifest, key).model_dump_json() if version in (0, num_versions) else "{}"
            report = make_report(version).model_dump_json() if version else None
            tx.write(
                insert(policies).values(
                    version=version,
                    weights_digest="0" * 64,
                    manifest=sealed,
                    origin_url="http://127.0.0.1:1",
                    report=report,
                    num_bytes=10**7,
                    published_at_s=now_s - num_versions + version,
                    seq=1,
                )
            )
        for number in range(num_nodes):
            tx.write(
                insert(nodes).values(
                    node=f"{number * 2654435761 % 2**32:08x}" + "ab" * 28,
                    enrolled_at_s=now_s - 1000,
                    software="shoal 0.2.0",
                    trust="trusted",
                    trust_reason="3 submissions accepted in a row",
                    trust_since_s=now_s - 500,
                    streak=9,
                    lapses=0,
                    lapsed_s=0,
                    session_epoch=1,
                    last_seen_s=now_s - number % 40,
                    live=1,
                    rows_per_s=10,
                    phase="generating with version 9999: 17 of 128 rows; busy 97.6% of the time",
                    policy_version=num_versions,
                    tokens_per_s=900,
                    accepted=number,
                    rejected=0,
                    void=1,
                    credit=1000 * number,
                    last_code="accepted",
                    last_detail="128 rows",
                )
            )


def measure_large(num_nodes: int, num_versions: int) -> dict[str, Any]:
    """Returns bytes and milliseconds of a run with this many nodes and versions."""
    spec = RunSpec(
        run="large",
        task=TaskSpec(name="sort", options={"length": 4}),
        compute_dtype="float32",
        sampling=Sampling(),
        last_version=num_versions + 1000,
    )
    with tempfile.TemporaryDirectory() as folder:
        coordinator = open_coordinator(CoordinatorConfig(), spec, Path(folder), log=Log("bench"))
        fill(coordinator, Key.load(Path(folder) / "keys" / "run.key"), num_nodes, num_versions)
        app = RunApp(coordinator)
        server = Server(app, listen("127.0.0.1", 0), on_close=app.feed.close)
        server.start()
        try:
            url = f"http://127.0.0.1:{server.port}"
            found = first_paint(url)
            began_s = time.monotonic()
            httpx2.get(f"{url}/v1/curve?first=4000&last=5000", timeout=60).raise_for_status()
            found["curve_ms"] = round(1000 * (time.monotonic() - began_s))
            return found | in_browser(url)
        finally:
            server.close()
            coordinator.close()


def first_paint(url: str) -> dict[str, Any]:
    """Returns the bytes that a browser receives until the page shows everything."""
    sizes: dict[str, int] = {}
    with httpx2.Client(base_url=url, timeout=60, headers={"Accept-Encoding": "gzip"}) as http:
        for path in PAGE_FILES:
            with http.stream("GET", path) as answer:
                sizes[path] = sum(len(chunk) for chunk in answer.iter_raw())
        with http.stream("GET", "/v1/events") as answer:
            sizes["first event"] = 0
            for chunk in answer.iter_raw():
                sizes["first event"] += len(chunk)
                if len(chunk) > 200:  # the first chunk only has the time to reconnect
                    break
    return {"first_paint_kB": round(sum(sizes.values()) / 1000, 1), "bytes": sizes}


def in_browser(url: str) -> dict[str, Any]:
    """Returns milliseconds in Chromium: until everything is drawn, and of one redraw, one move of the cursor and one zoom."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return {"browser": "playwright is not installed"}
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        began_s = time.monotonic()
        page.goto(url)
        page.wait_for_selector("#charts svg path", timeout=120_000)
        drawn_ms = 1000 * (time.monotonic() - began_s)
        timed = """(work) => {
            const began = performance.now();
            ({redraw, curves: () => drawCurves(state), cursor: () => moveCursor(5000)})[work]();
            document.body.offsetHeight;  // waits for the layout
            return performance.now() - began;
        }"""
        times = {
            f"{name}_ms": round(statistics.median(page.evaluate(timed, name) for _ in range(5)), 1)
            for name in ("redraw", "curves", "cursor")
        }
        browser.close()
    return {"drawn_ms": round(drawn_ms), **times}


# -- viewers of a running coordinator -----------------------------------------------------------------------


def processor_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def follow(url: str, stop: threading.Event, received: list[int]) -> None:
    with httpx2.Client(timeout=60) as http, http.stream("GET", f"{url}/v1/events") as answer:
        for chunk in answer.iter_raw():
            received.append(len(chunk))
            if stop.is_set():
                return


def measure(pid: int, seconds: float) -> float:
    """Percent of a core."""
    before, began_s = processor_s(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (processor_s(pid) - before) / (time.monotonic() - began_s)


def measure_viewers(options: argparse.Namespace) -> None:
    """Prints the processor time of a running coordinator with and without viewers."""
    print(f"first paint: {json.dumps(first_paint(options.url))}")
    alone, watched = [], []
    for _ in range(options.turns):
        alone.append(measure(options.pid, options.seconds))
        stop = threading.Event()
        received: list[int] = []
        threads = [
            threading.Thread(target=follow, args=(options.url, stop, received), daemon=True)
            for _ in range(options.viewers)
        ]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        watched.append(measure(options.pid, options.seconds))
        stop.set()
        for thread in threads:
            thread.join(40)
        print(
            f"alone {alone[-1]:.2f} %, with {options.viewers} viewers {watched[-1]:.2f} %; "
            f"{sum(received) / options.viewers / options.seconds / 1000:.1f} kB/s to each"
        )
    cost = statistics.mean(watched) - statistics.mean(alone)
    print(f"viewers cost {cost:.2f} % of a core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", nargs="?", help="a running coordinator; without it, a large run is made")
    parser.add_argument("pid", type=int, nargs="?", help="the coordinator's")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    options = parser.parse_args()
    if options.url and options.pid:
        measure_viewers(options)
    else:
        print(json.dumps(measure_large(options.nodes, options.versions)))


if __name__ == "__main__":
    main()
