"""Tickets for relays: for members of the run, not for strangers, not for those who were ejected."""

from small_swarm import Node, SmallSwarm, refusal
from sqlalchemy import update

from shoal.net.tickets import PAUSE_S, Tickets
from shoal.swarm.coordinator.schema import nodes
from shoal.telemetry import Log
from shoal.wire.record import Sealed
from shoal.wire.ticket import TICKET_S, Ticket, check_ticket

LOG = Log("test")


def ask(node: Node) -> Sealed[Ticket]:
    return node.client.call("POST", "/v1/tickets", None, Sealed[Ticket])


def ban(swarm: SmallSwarm, node: Node) -> None:
    with swarm.coordinator.transaction() as tx:
        tx.db.execute(update(nodes).where(nodes.c.node == node.id).values(trust="banned"))


def test_a_member_gets_one_that_its_run_key_signed(swarm: SmallSwarm) -> None:
    node = swarm.node()
    ticket = ask(node).open(swarm.coordinator.run_key.public)
    assert (ticket.run, ticket.holder) == (swarm.spec.run, node.id)
    assert abs(ticket.expires_at_s - swarm.clock() - TICKET_S) < 10


def test_roles_get_one_strangers_and_ejected_nodes_do_not(swarm: SmallSwarm) -> None:
    for client in (swarm.relay, swarm.validator, swarm.trainer):
        assert client.call("POST", "/v1/tickets", None, Sealed[Ticket]).body.holder == client.key.public
    assert refusal(ask, swarm.stranger()).code == "request.unknown_key"
    node = swarm.node()
    ask(node)
    ban(swarm, node)
    assert refusal(ask, node).code == "request.banned"


def test_a_ticket_is_kept_until_half_of_it_is_over_and_longer_if_there_is_no_other(
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
    assert tickets() == second  # no other is to be had; relays may still take it
    now_s[0] += PAUSE_S - 1
    node.client.stop.set()
    now_s[0] += TICKET_S
    assert tickets() == second
