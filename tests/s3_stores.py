"""S3-compatible stores as processes on loopback: one that compares what uploads declare, and one that only checks signatures.

`make s3` installs both into .venv-s3. LocalStack checks signatures, sizes, SHA-256 and If-None-Match; rclone's checks
signatures alone.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from shoal.net.s3_store import Credentials

VENV = Path(os.environ.get("SHOAL_S3_VENV", Path(__file__).parents[1] / ".venv-s3"))
# The key of LocalStack's only account.
CREDENTIALS = Credentials(access_key="test", secret_key="test")
BUCKET = "rollouts"
START_S = 90.0


@dataclass(frozen=True)
class Store:
    port: int

    @property
    def url(self) -> str:
        """The address, in the form that a run file has."""
        return f"s3://{BUCKET}/runs?endpoint=http://127.0.0.1:{self.port}"

    def names(self) -> list[str]:
        """Returns the names of all objects, of every run."""
        listed = _client(self.port).list_objects_v2(Bucket=BUCKET)
        return [entry["Key"] for entry in listed.get("Contents", [])]


@contextmanager
def strict_store() -> Iterator[Store]:
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="shoal-s3-") as home:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "SERVICES": "s3",
            "GATEWAY_LISTEN": f"127.0.0.1:{port}",
            "GATEWAY_SERVER": "hypercorn",
            "S3_SKIP_SIGNATURE_VALIDATION": "0",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DISABLE_EVENTS": "1",
            "FILESYSTEM_ROOT": f"{home}/root",
        }
        command = [str(VENV / "bin" / "python"), "-m", "localstack.runtime.main"]
        with _running(command, environ, port, Path(home)):
            yield Store(port)


@contextmanager
def careless_store() -> Iterator[Store]:
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="shoal-s3-") as home:
        (Path(home) / "served").mkdir()
        key = f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}"
        command = [str(VENV / "bin" / "rclone"), "serve", "s3", "--auth-key", key]
        command += ["--addr", f"127.0.0.1:{port}", f"{home}/served"]
        with _running(command, {"PATH": os.environ["PATH"], "HOME": home}, port, Path(home)):
            yield Store(port)


@contextmanager
def _running(command: list[str], environ: dict[str, str], port: int, home: Path) -> Iterator[None]:
    if not Path(command[0]).exists():
        pytest.fail(f"{command[0]} is missing; `make s3` installs it")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environ, cwd=home, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _make_bucket(process, port, home / "log")
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _make_bucket(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        try:
            _client(port).create_bucket(Bucket=BUCKET)
            return
        except (BotoCoreError, ClientError):  # not started yet
            time.sleep(0.2)
    raise AssertionError(f"the store did not start: {log.read_text()[-2000:]}")


def _client(port: int) -> Any:
    return boto3.client(
        "s3",
        region_name="us-east-1",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=CREDENTIALS.access_key,
        aws_secret_access_key=CREDENTIALS.secret_key,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
