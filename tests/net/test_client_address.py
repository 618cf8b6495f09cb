"""Addresses of clients behind a reverse proxy: only one on the same machine is believed."""

import pytest

from shoal.net.rate_limit import with_client_address


def seen(peer: str, *forwarded: str) -> str:
    """Returns the address that a server takes for the client's."""
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    scope = {"type": "http", "client": (peer, 40000), "headers": headers}
    return str(with_client_address(scope)["client"][0])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("127.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("::1", ["203.0.113.9"], "203.0.113.9"),
        ("::ffff:127.0.0.1", ["2001:db8::9"], "2001:db8::9"),
        # What the client itself sent stands before what the proxy wrote.
        ("127.0.0.1", ["198.51.100.1, 203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", ["198.51.100.1", "203.0.113.9"], "203.0.113.9"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("127.0.0.1", ["somebody"], "127.0.0.1"),
        ("127.0.0.1", ["203.0.113.9,"], "127.0.0.1"),
        # Another machine may be a client that lies.
        ("10.0.0.2", ["203.0.113.9"], "10.0.0.2"),
        ("8.8.8.8", ["203.0.113.9"], "8.8.8.8"),
        ("testclient", ["203.0.113.9"], "testclient"),
    ],
)
def test_the_last_address_that_a_proxy_on_this_machine_wrote_is_the_clients(
    peer: str, forwarded: list[str], client: str
) -> None:
    assert seen(peer, *forwarded) == client


def test_other_headers_stay_and_those_of_the_proxy_go() -> None:
    host, own = (b"host", b"swarm.example"), (b"x-forwarded-for", b"203.0.113.9")
    scope = {"type": "http", "client": ("127.0.0.1", 1), "headers": [host, own, (b"x-real-ip", b"1.2.3.4")]}
    assert with_client_address(scope)["headers"] == [host]


def test_a_request_without_a_client_stays_as_it_is() -> None:
    scope = {"type": "http", "headers": [(b"x-forwarded-for", b"203.0.113.9")]}
    assert with_client_address(scope) is scope
