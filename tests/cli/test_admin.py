"""`shoal admin` against a real coordinator."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from test_ledger_verify import SPEC

from running_coordinator import running_coordinator
from shoal.cli.main import parse, run_command
from shoal.cli.ui.values import ADMIN_ACTIONS
from shoal.net.http_client import SignedClient
from shoal.swarm.coordinator.membership.admin_actions import ACTIONS as KNOWN
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.messages import Enrol, Enrolled
from shoal.wire.run_spec import PROTOCOL


def admin(folder: Path, url: str, *words: str) -> int:
    arguments = ["admin", *words, "--coordinator", url, "--key", str(folder / "keys" / "admin.key")]
    return run_command(parse(arguments), threading.Event())


def test_actions_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = Key.generate()
    with running_coordinator(tmp_path, SPEC) as url:
        with closing(SignedClient(url, node, log=Log("test"))) as client:
            client.call("POST", "/v1/enrol", Enrol(protocol=PROTOCOL, software="test"), Enrolled)
        assert admin(tmp_path, url, "ban", node.public, "--reason", "it spoke ill") == 0
        assert capsys.readouterr().out.startswith("ban: done, ledger event ")
        assert admin(tmp_path, url, "invite", "--reason", "friends", "--amount", "3") == 0
        assert "shoal join http://127.0.0.1" in capsys.readouterr().out
        assert admin(tmp_path, url, "ban", "ab" * 32, "--reason", "who is it") == 1
        assert "no node" in capsys.readouterr().err
        assert admin(tmp_path, url, "ban", "--reason", "it lies often") == 2
        assert "`shoal admin ban` needs a node: write its id after 'ban'" in capsys.readouterr().err
        assert admin(tmp_path, url, "pause", "--reason", "x") == 2
        assert "is too short; say why" in capsys.readouterr().err


def test_every_action_has_a_description() -> None:
    assert set(ADMIN_ACTIONS) == set(KNOWN)
