"""Tickets for relays: members of the run get them, unknown and ejected keys do not."""

import threading
from pathlib import Path
from typing import Any

import pytest
from small_swarm import Node, SmallSwarm, refusal
from sqlalchemy import update

from shoal import shardcast
from shoal.net.http_client import TICKET_PAUSE_S, Tickets
from shoal.net.http_server import listen
from shoal.net.waiting import DeadlinePassed
from shoal.swarm.coordinator.store.schema import nodes
from shoal.telemetry import Log
from shoal.wire.delegation import read_relay_delegation, write_relay_key
from shoal.wire.keys import Key
from shoal.wire.record import Sealed
from shoal.wire.ticket import TICKET_S, Ticket, check_ticket

LOG = Log("test")


def ask(node: Node) -> Sealed[Ticket]:
    return node.client.call("POST", "/v1/tickets", None, Sealed[Ticket])


def ban(swarm: SmallSwarm, node: Node) -> None:
    with swarm.coordinator.transaction() as tx:
        tx.db.execute(update(nodes).where(nodes.c.node == node.id).values(trust="banned"))


def test_a_member_gets_a_ticket_signed_by_the_run_key(swarm: SmallSwarm) -> None:
    node = swarm.node()
    ticket = ask(node).open(swarm.coordinator.run_key.public)
    assert (ticket.run, ticket.holder) == (swarm.spec.run, node.id)
    assert abs(ticket.expires_at_s - swarm.clock() - TICKET_S) < 10


def test_roles_get_tickets_and_unknown_and_ejected_keys_do_not(swarm: SmallSwarm) -> None:
    for client in (swarm.relay, swarm.validator, swarm.trainer):
        assert client.call("POST", "/v1/tickets", None, Sealed[Ticket]).body.holder == client.key.public
    assert refusal(ask, swarm.stranger()).code == "request.unknown_key"
    node = swarm.node()
    ask(node)
    ban(swarm, node)
    assert refusal(ask, node).code == "request.banned"


def test_a_ticket_is_cached_until_half_of_its_time_and_longer_if_no_new_one_can_be_had(
    swarm: SmallSwarm,
) -> None:
    now_s = [0.0]
    node = swarm.node()
    tickets = Tickets(node.client, log=LOG, clock=lambda: now_s[0])
    first = tickets()
    run_key = swarm.coordinator.run_key.public
    assert check_ticket(first, run=swarm.spec.run, run_key=run_key, now_s=swarm.clock()).holder == node.id
    now_s[0] += TICKET_S / 2 - 1
    assert tickets() == first
    now_s[0] += 2
    second = tickets()
    assert second != first
    ban(swarm, node)
    now_s[0] += TICKET_S
    assert tickets() == second  # no other ticket is available; relays may still accept this one
    now_s[0] += TICKET_PAUSE_S - 1
    node.client.stop.set()
    now_s[0] += TICKET_S
    assert tickets() == second


@pytest.mark.on_socket
def test_a_private_relay_serves_members_of_the_run_only(swarm: SmallSwarm, tmp_path: Path) -> None:
    """Coordinator, private origin, private relay and node get and send tickets automatically."""
    key, stop = swarm.coordinator.run_key, threading.Event()
    store = shardcast.VersionStore(tmp_path / "origin", run=swarm.spec.run, run_key=key.public)
    store.path(0).mkdir()
    (store.path(0) / "weights.safetensors").write_bytes(bytes(5000))
    sealed = shardcast.publish(store.path(0), run=swarm.spec.run, version=0, key=key)
    store.adopt(0)
    origin = shardcast.RelayServer(store, listen("127.0.0.1", 0), private=True)
    origin.start()
    key_file = write_relay_key(swarm.relay.key, "http://127.0.0.1:20777", tmp_path / "key")
    delegation = read_relay_delegation(key_file)
    config = shardcast.RelayConfig(
        folder=tmp_path / "relay",
        coordinator=swarm.url,
        port=int(delegation.body.url.rsplit(":", 1)[1]),
        delegation=delegation,
        upstreams=(f"http://127.0.0.1:{origin.port}",),
        private=True,
    )
    relay = shardcast.Relay(config, Key.load(key_file), log=LOG, stop=stop)
    relay.startup()
    terms: dict[str, Any] = {"run_key": key.public, "log": LOG, "stop": threading.Event()}
    try:
        member = shardcast.RelayChoice([relay.url], ticket=Tickets(swarm.node().client, log=LOG))
        folder = shardcast.fetch_version(sealed, member, tmp_path / "node", deadline_s=60, **terms)
        assert (folder / "weights.safetensors").read_bytes() == bytes(5000)
        with pytest.raises(DeadlinePassed, match="send a ticket"):
            shardcast.fetch_version(sealed, [relay.url], tmp_path / "stranger", deadline_s=0.5, **terms)
    finally:
        relay.shutdown()
        store.close()
        origin.close()
