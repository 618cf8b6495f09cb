"""What viewers of the page cost its coordinator: processor time with and without them, in turns.

    shoal coordinator runs/demo.toml --dir out/demo/coordinator --port 8700 &
    python bench/page.py http://127.0.0.1:8700 $! --viewers 10

A coordinator that serves a live run does other work too; the turns are what tells the two apart.
"""

import argparse
import os
import statistics
import threading
import time

import httpx2

FILES = ("/", "/page.css", "/page.js", "/v1/page")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("pid", type=int, help="the coordinator's")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    options = parser.parse_args()

    sizes = {path: len(httpx2.get(options.url + path).raise_for_status().content) for path in FILES}
    print(f"first paint: {sum(sizes.values()) / 1000:.1f} kB in all, uncompressed: {sizes}")
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


if __name__ == "__main__":
    main()
