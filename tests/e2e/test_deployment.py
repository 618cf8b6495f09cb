"""The deployment that docs/guides/operator.md describes, with the files of deploy/: two coordinators on one PostgreSQL behind nginx
with TLS. Workers, uploads and the live page go through it, and one of the two is killed on the way."""

import datetime
import importlib.util
import ipaddress
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from roles import Roles, free_port, run_file
from swarm_processes import SHOAL, read_ledger

from shoal.wire.ledger import verify_chain

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"

needs_nginx = pytest.mark.skipif(not os.path.exists(NGINX), reason="no nginx here")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Writes a self-signed certificate of localhost and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "certificate.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths


def configure_nginx(folder: Path, port: int, upstreams: tuple[int, ...]) -> Path:
    """Starts nginx with the shipped file, on other ports, with another certificate and in its own folder."""
    certificate, key = make_certificate(folder)
    text = (ROOT / "deploy" / "nginx.conf").read_text()
    servers = "\n".join(f"    server 127.0.0.1:{one} max_fails=1 fail_timeout=5s;" for one in upstreams)
    changes = {
        "    server 127.0.0.1:8700 max_fails=1 fail_timeout=5s;": servers,
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "server_name swarm.example;": "server_name localhost;",
        "/etc/letsencrypt/live/swarm.example/fullchain.pem": str(certificate),
        "/etc/letsencrypt/live/swarm.example/privkey.pem": str(key),
    }
    for old, new in changes.items():
        assert text.count(old) == 1, f"deploy/nginx.conf has no line {old!r}"
        text = text.replace(old, new)
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = folder / "nginx.conf"
    whole.write_text(
        f"pid {folder}/nginx.pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\nlog_format by '$request_method $status $upstream_addr';\naccess_log {folder}/access.log by;\n"
        f"{temporary}\n{text}\n}}\n"
    )
    return whole


@contextmanager
def running_nginx(config: Path) -> Iterator[None]:
    # nginx runs as the user of the test: its own user may not enter the temporary folder.
    user = "user root; " if os.geteuid() == 0 else ""
    process = subprocess.Popen([NGINX, "-c", str(config), "-g", f"{user}daemon off;"])
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@needs_nginx
def test_nginx_accepts_the_file_that_ships(tmp_path: Path) -> None:
    config = configure_nginx(tmp_path, free_port(), (8700, 8710))
    checked = subprocess.run([NGINX, "-t", "-c", config], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_units_that_ship(tmp_path: Path) -> None:
    units = []
    for unit in sorted((ROOT / "deploy").glob("*.service")):
        text = unit.read_text()
        assert "ExecStart=/opt/shoal/bin/shoal " in text
        # systemd-analyze accepts a unit only if its program exists.
        path = tmp_path / unit.name.replace("@", "@8700")
        path.write_text(text.replace("/opt/shoal/bin/shoal", "/usr/bin/env"))
        units.append(str(path))
    assert len(units) == 4
    checked = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def running_postgres() -> Any:
    """Starts PostgreSQL as the coordinator's tests do."""
    path = ROOT / "tests" / "swarm" / "coordinator" / "postgres.py"
    spec = importlib.util.spec_from_file_location("postgres_of_the_tests", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.why_not() is not None:
        pytest.skip(f"PostgreSQL: {module.why_not()}")
    return module.running_postgres()


def first_event(url: str, trust: Any) -> str:
    with httpx2.stream("GET", f"{url}/v1/events", verify=trust, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data:"):
                return line
    raise AssertionError("the stream ended without an event")


@needs_nginx
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_two_coordinators_behind_nginx_and_tls(tmp_path: Path) -> None:
    front, *ports = (free_port() for _ in range(3))
    url = f"https://localhost:{front}"
    file = run_file(tmp_path / "run.toml", "deployed", last_version=4)
    text = file.read_text().replace(
        "[coordinator]\n", f'[coordinator]\nauthorities = ["localhost:{front}"]\n'
    )
    file.write_text(text)
    config = configure_nginx(tmp_path, front, (ports[0], ports[1]))
    certificate = tmp_path / "certificate.pem"
    trust = ssl.create_default_context(cafile=str(certificate))
    dir = tmp_path / "coordinator"
    with (
        running_postgres() as postgres,
        Roles(tmp_path, {"SSL_CERT_FILE": str(certificate)}) as roles,
        running_nginx(config),
    ):
        database = postgres.fresh()
        for port in ports:
            words = (file, "--dir", dir, "--database", database, "--port", port)
            roles.start(f"coordinator-{port}", "coordinator", *words)
            roles.wait_until_up(f"http://127.0.0.1:{port}")
        roles.start_crew(url, file, dir / "keys")
        worker = roles.start("worker", "join", url, "--yes", "--threads", "1")

        def accepted() -> int:
            stats = httpx2.get(f"{url}/v1/stats", verify=trust, timeout=30).raise_for_status().json()
            return int(stats["submissions"].get("accepted", 0))

        roles.wait_for("a first accepted submission", accepted)
        assert '"run":' in first_event(url, trust)
        assert httpx2.get(url, verify=trust).is_success
        roles.processes[f"coordinator-{ports[0]}"].kill()
        stats = roles.wait_until_finished(url, verify=trust, timeout=30)
        assert worker.wait(200) == 0
        events = list(read_ledger(f"http://127.0.0.1:{ports[1]}"))
    verify_chain(events)
    assert stats.newest_version == 4
    # Both have served, and bytes have come in.
    log = (tmp_path / "access.log").read_text()
    assert all(f"127.0.0.1:{port}" in log for port in ports)
    assert "PUT 204" in log


@needs_nginx
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_compose_file_as_processes(tmp_path: Path) -> None:
    """Starts what deploy/compose/compose.yaml starts, with its own commands and nginx file, as processes on loopback."""
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "deploy" / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    names = ("nginx", "coordinator-1", "coordinator-2", "trainer", "relay")
    places = {name: free_port() for name in names}
    run = tmp_path / "run.toml"
    text = (folder / "run.toml").read_text().replace("nginx:8080", f"127.0.0.1:{places['nginx']}")
    run.write_text(text.replace("last_version = 100", "last_version = 4"))

    with running_postgres() as postgres, Roles(tmp_path) as roles:
        database = postgres.fresh()

        def words_of(name: str) -> list[str]:
            """Returns the command of a service, with the places that containers have replaced by those on this machine."""
            command = str(services[name]["command"])
            for host in ("nginx:8080", "trainer:8701", "relay:8702"):
                command = command.replace(f"http://{host}", f"http://127.0.0.1:{places[host.split(':')[0]]}")
            port = places.get(name, 0)
            changes = {
                "/etc/shoal/run.toml": str(run),
                "postgresql://shoal@postgres/shoal": database,
                "--host 0.0.0.0": "--host 127.0.0.1",
                "/swarm/": f"{tmp_path}/coordinator-volume/",
                "/var/lib/shoal/coordinator": f"{tmp_path}/coordinator-volume/coordinator",
                "/var/lib/shoal/relay-key": f"{tmp_path}/coordinator-volume/relay-key",
                "/var/lib/shoal/": f"{tmp_path}/{name}/",
            }
            for old, new in changes.items():
                command = command.replace(old, new)
            words = command.split()
            if "--port" in words:
                words[words.index("--port") + 1] = str(port)
            return words

        config = tmp_path / "nginx.conf"
        server = (
            (folder / "nginx.conf")
            .read_text()
            .replace("listen 8080;", f"listen 127.0.0.1:{places['nginx']};")
        )
        for name in ("coordinator-1", "coordinator-2"):
            server = server.replace(f"server {name}:8700", f"server 127.0.0.1:{places[name]}")
        temporary = "".join(
            f"{kind}_temp_path {tmp_path}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config.write_text(
            f"pid {tmp_path}/nginx.pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{temporary}\n{server}\n}}\n"
        )
        for name in ("coordinator-1", "coordinator-2"):
            roles.start(name, *words_of(name))
            roles.wait_until_up(f"http://127.0.0.1:{places[name]}")
        with running_nginx(config):
            made = subprocess.run(
                [*SHOAL, *words_of("relay-key")], capture_output=True, text=True, timeout=120
            )
            assert made.returncode == 0, made.stderr
            for name in ("trainer", "relay", "validator", "worker"):
                roles.start(name, *words_of(name))
            stats = roles.wait_until_finished(f"http://127.0.0.1:{places['nginx']}", timeout=30)
    assert stats.newest_version == 4
    assert stats.submissions["accepted"] and not any(node.rejected for node in stats.nodes)
