"""The page behind a real nginx, configured as docs/page.md says: under a prefix, and events are not buffered."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from small_swarm import SmallSwarm

from shoal.net.waiting import NotYet, wait_for
from shoal.telemetry import Log

DOCS = Path(__file__).parents[3] / "docs" / "page.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.on_socket,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def behind(swarm: SmallSwarm, tmp_path: Path) -> Iterator[str]:
    """Returns the URL under which nginx serves the page of a started swarm."""
    swarm.start()
    found = re.search(r"^```nginx\n(location .*?)^```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None and found[1].count("http://127.0.0.1:8700/") == 1
    location = found[1].replace("http://127.0.0.1:8700/", f"{swarm.url}/")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    temp = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.getuid() == 0 else ""  # the test's folders are its own
    conf = tmp_path / "nginx.conf"
    conf.write_text(
        f"daemon off; master_process off; {user} pid {tmp_path}/pid; error_log {tmp_path}/log;"
        f"events {{}} http {{ {temp} access_log off; server {{ listen 127.0.0.1:{port};\n{location}\n}} }}"
    )
    process = subprocess.Popen([str(NGINX), "-p", tmp_path, "-c", conf], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/runs/demo/"
    try:
        wait_for(
            "nginx to answer", lambda: look(url), deadline_s=30.0, log=Log("test"), stop=threading.Event()
        )
        yield url
    finally:
        process.terminate()
        process.wait(20)


def look(url: str) -> None:
    try:
        httpx2.get(url).raise_for_status()
    except httpx2.TransportError as error:
        raise NotYet(str(error)) from None


def test_nginx_does_not_buffer_events(swarm: SmallSwarm, behind: str) -> None:
    with httpx2.stream("GET", f"{behind}v1/events", timeout=60.0) as answer:
        events = (json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:"))
        first = next(events)
        assert first["now"]["newest_version"] == 0
        # The data fills no buffer and the connection stays open, so nginx must have forwarded the event immediately.
        node = swarm.node()
        for event in events:
            if node.id in json.dumps(event.get("workers", [])):
                break


@pytest.mark.browser
def test_the_page_moves_behind_nginx(swarm: SmallSwarm, behind: str, page: Any) -> None:
    page.goto(behind)
    node = swarm.node()
    page.click(f'#workers a[href="#node/{node.id}"]')
    page.wait_for_selector("#node-figures dd")
    page.go_back()
    swarm.fill(node)
    swarm.batch(0)
    swarm.announce(1)
    page.wait_for_selector('#curve .smooth[data-points="1"]', state="attached")
    assert page.get_attribute("#link", "data-state") == "live"
