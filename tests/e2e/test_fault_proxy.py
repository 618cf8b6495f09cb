"""Every role a process of its own, and between all of them and the coordinator a network that delays, resets, half-closes,
delivers twice and drips: the run finishes, and its ledger adds up."""

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from swarm_processes import RUN_FILE, Role, read_ledger, shoal

from fault_proxy import FAULTS, FaultProxy
from shoal.wire.delegation import write_relay_key
from shoal.wire.keys import Key
from shoal.wire.messages import Stats

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SHARE = 0.25
"""The share of requests that meet a fault."""
LAST = 5


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_the_run_finishes(tmp_path: Path) -> None:
    port, keys = free_port(), tmp_path / "coordinator" / "keys"
    proxy = FaultProxy(port, seed=7, share=SHARE)
    far = f"http://127.0.0.1:{proxy.port}"
    text = RUN_FILE.format(last_version=LAST, relays=1, workers=1, lies="[]", deadline_s=240)
    file = tmp_path / "run.toml"
    file.write_text(
        text.replace("[coordinator]\n", f'[coordinator]\nauthorities = ["127.0.0.1:{proxy.port}"]\n')
    )
    dirs = {
        name: str(tmp_path / name) for name in ("coordinator", "trainer", "relay", "validator", "w1", "w2")
    }
    patient = ("--deadline-s", "240")
    with ExitStack() as stack:

        def start(*arguments: str) -> Role:
            return stack.enter_context(Role(tmp_path / "logs", *arguments))

        near = start("coordinator", str(file), "--dir", dirs["coordinator"], "--port", str(port))
        near.wait_for_log("serving")
        by_proxy = ("--coordinator", far, *patient)
        trainer = start("trainer", str(file), *by_proxy, "--keys", str(keys), "--dir", dirs["trainer"])
        relay_port = free_port()
        key = write_relay_key(
            Key.load(keys / "relay.key"), f"http://127.0.0.1:{relay_port}", tmp_path / "relay-key"
        )
        start("relay", *by_proxy, "--key", str(key), "--port", str(relay_port), "--dir", dirs["relay"])
        start("validator", *by_proxy, "--key", str(keys / "validator.key"), "--dir", dirs["validator"])
        workers = [start("worker", *by_proxy, "--dir", dirs[name]) for name in ("w1", "w2")]
        assert trainer.wait_until_over(300) == 0, trainer.log[-3000:]
        for worker in workers:
            assert worker.wait_until_over(120) == 0, worker.log[-3000:]
        url = f"http://127.0.0.1:{port}"
        stats = Stats.parse(httpx2.get(f"{url}/v1/stats").raise_for_status().content)
        assert (stats.newest_version, stats.finished) == (LAST, True)
        assert not {code for code in stats.submissions if code.startswith("reject.")}, stats.submissions
        formed = [event.body["group_ids"] for event in read_ledger(url) if event.type == "batch.formed"]
        trained = [group for groups in formed for group in groups]
        assert len(formed) == LAST and len(trained) == len(set(trained))
        verified = shoal("ledger", "verify", url)
        assert verified.returncode == 0, verified.stdout + verified.stderr
    proxy.close()
    assert set(proxy.met) == set(FAULTS), proxy.met
