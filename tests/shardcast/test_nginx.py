"""The shipped nginx configuration, in a real nginx: complete files from the folder, the rest from the relay behind it."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shoal.net.waiting import DeadlinePassed
from shoal.shardcast import RelayApp, RelayChoice, VersionStore, fetch_manifest
from shoal.shardcast.assembly import shards_of
from shoal.telemetry import Log
from shoal.wire.keys import Key

CONF = Path(__file__).parents[2] / "docs" / "nginx" / "shoal-relay.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light"),
]


@pytest.fixture
def nginx(tmp_path: Path, kit: Any) -> Iterator[Any]:
    """Starts nginx with the shipped configuration over a folder and returns its URL."""
    running = []

    def start(folder: Path, relay_port: int = 9, **changes: str) -> str:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        conf = CONF.read_text()
        for old, new in (
            ("server 127.0.0.1:8702;", f"server 127.0.0.1:{relay_port};"),
            ("listen 8700;", f"listen 127.0.0.1:{port};"),
            ("root /var/lib/shoal/relay;", f"root {folder};"),
            *changes.items(),
        ):
            assert conf.count(old) == 1, old
            conf = conf.replace(old, new)
        place = tmp_path / f"nginx-{port}"
        place.mkdir()
        temp = "".join(
            f"{kind}_temp_path {place}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        user = "user root;" if os.getuid() == 0 else ""  # the test's folders are its own
        (place / "nginx.conf").write_text(
            f"daemon off; master_process off; {user} pid {place}/pid; error_log {place}/log;"
            f"events {{}} http {{ {temp}\n{conf}\n}}"
        )
        process = subprocess.Popen(
            [str(NGINX), "-p", place, "-c", place / "nginx.conf"], stderr=subprocess.DEVNULL
        )
        running.append(process)

        def up() -> bool:
            assert process.poll() is None, (place / "log").read_text()
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False

        kit.eventually(up, "nginx")
        return f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.terminate()
        process.wait(20)


def test_a_complete_version_needs_no_relay(
    origin: Any, kit: Any, fetch: Any, nginx: Any, key: Key, log: Log, stop: Any
) -> None:
    sealed = origin.publish(7, kit.random_files())
    url = nginx(origin.store.folder)  # without a relay behind it
    assert fetch_manifest(7, [url], run_key=key.public, log=log, stop=stop, deadline_s=30) == sealed
    assert kit.file_bytes(fetch(sealed, [url])) == kit.random_files()


def test_an_arriving_version_is_served_by_the_relay(
    origin: Any, kit: Any, serve: Any, fetch: Any, nginx: Any, key: Key, tmp_path: Path
) -> None:
    files = kit.random_files()
    sealed = origin.publish(7, files)
    store = VersionStore(tmp_path / "relay", run=kit.RUN, run_key=key.public)
    store.begin(sealed)
    with store.writing(7) as assembly:
        for shard in shards_of(sealed.body.file("model.safetensors"))[:3]:
            assembly.write(shard, files["model.safetensors"][shard.start : shard.stop])
    relay = serve(RelayApp(store))
    url = nginx(store.folder, int(relay.rsplit(":", 1)[1]))
    with httpx2.Client() as http:
        part = http.get(f"{url}/versions/7/model.safetensors", headers={"Range": "bytes=500-2999"})
        assert (part.status_code, part.content) == (206, files["model.safetensors"][500:3000])
        assert (
            http.get(
                f"{url}/versions/7/model.safetensors?wait_s=0", headers={"Range": "bytes=3000-"}
            ).status_code
            == 425
        )
        assert http.get(f"{url}/manifests/latest").content == sealed.canonical()
        assert http.get(f"{url}/healthz").json()["newest"] == 7
    # The other relay has the missing shards.
    assert kit.file_bytes(fetch(sealed, [url, serve(origin.app)])) == files


def test_a_private_relay_behind_nginx_checks_tickets(
    origin: Any, kit: Any, serve: Any, fetch: Any, nginx: Any, key: Key
) -> None:
    sealed = origin.publish(7, kit.random_files())
    relay = serve(RelayApp(origin.store, private=True))
    port = int(relay.rsplit(":", 1)[1])
    url = nginx(origin.store.folder, port, **{"# auth_request /ticket;": "auth_request /ticket;"})
    with httpx2.Client() as http:
        for path in ("/versions/7/config.json", "/manifests/7", "/manifests/latest", "/ticket"):
            assert http.get(url + path).status_code in (401, 404), path
        assert http.get(f"{url}/healthz").json()["newest"] == 7
    with pytest.raises(DeadlinePassed, match="HTTP 401"):
        fetch(sealed, [url], deadline_s=1.0)
    choice = RelayChoice([url], ticket=lambda: kit.ticket(key))
    assert kit.file_bytes(fetch(sealed, choice)) == kit.random_files()


@pytest.mark.parametrize(
    "path",
    [
        "/v7/config.json",
        "/versions/7/.secret",
        "/versions/7/%2e%2e/x",
        "/versions/7/..%2f..%2fsecret",
        "/etc/passwd",
    ],
)
def test_no_other_file_is_served(origin: Any, kit: Any, nginx: Any, path: str) -> None:
    origin.publish(7, kit.random_files())
    (origin.store.path(7) / ".secret").write_text("secret")
    (origin.store.folder.parent / "secret").write_text("secret")
    response = httpx2.get(nginx(origin.store.folder) + path)
    assert response.status_code in (400, 404, 502)
    assert "secret" not in response.text


def test_a_client_succeeds_in_spite_of_429(origin: Any, kit: Any, fetch: Any, nginx: Any) -> None:
    sealed = origin.publish(7, kit.random_files())
    url = nginx(origin.store.folder, **{"rate=100r/s": "rate=10r/s", "burst=200": "burst=2"})
    with httpx2.Client() as http:
        assert 429 in [http.get(f"{url}/manifests/7").status_code for _ in range(10)]
    assert kit.file_bytes(fetch(sealed, [url])) == kit.random_files()
