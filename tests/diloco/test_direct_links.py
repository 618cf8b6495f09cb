"""Tests of direct links on loopback: encrypted both ways, one use per offer; other connections are refused."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shoal.diloco.transport import mesh
from shoal.diloco.transport.hivemind_mesh import HivemindMesh, PeerAddress
from shoal.diloco.transport.mesh import DirectLinks, LinkOffer, connect_direct
from shoal.diloco.transport.stream import EncryptedStream, Stream, StreamBroken
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

HOST = "127.0.0.1"
LARGE = bytes(range(256)) * 8192


async def echo(stream: Stream) -> None:
    """Sends the caller's id, then every received frame."""
    await stream.send(stream.peer.encode())
    try:
        while True:
            await stream.send(await stream.receive())
    except StreamBroken:
        pass


def with_links(test: Callable[[DirectLinks], Awaitable[None]]) -> None:
    async def run() -> None:
        links = DirectLinks(echo, Log("test"))
        await links.listen(HOST, 0)
        try:
            async with asyncio.timeout(60):
                await test(links)
        finally:
            links.close()
            await asyncio.sleep(0.05)  # transports close in the next iterations of the loop

    asyncio.run(run())


def test_frames_go_both_ways_and_the_link_belongs_to_the_offered_peer() -> None:
    async def test(links: DirectLinks) -> None:
        stream = await connect_direct(HOST, LinkOffer.parse(links.offer("anna").canonical()), peer="bert")
        assert await stream.receive() == b"anna" and stream.peer == "bert"
        for payload in (b"", b"x", LARGE):
            await stream.send(payload)
            assert await stream.receive() == payload
        stream.close()

    with_links(test)


def test_offer_is_valid_once_and_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(links: DirectLinks) -> None:
        offer = links.offer("anna")
        (await connect_direct(HOST, offer, peer="x")).close()
        with pytest.raises(StreamBroken, match="no direct link to 127"):
            await connect_direct(HOST, offer, peer="x")
        monkeypatch.setattr(mesh, "OFFER_S", -1.0)
        with pytest.raises(StreamBroken):
            await connect_direct(HOST, links.offer("anna"), peer="x")

    with_links(test)


def test_connections_without_a_valid_token_are_closed_and_others_still_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "CONNECT_S", 0.5)

    async def test(links: DirectLinks) -> None:
        port = links.offer("anna").port
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"", b"short"):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(noise)
            assert await reader.read() == b"", "closed without a reply"
            writer.close()
        monkeypatch.setattr(mesh, "CONNECT_S", 10.0)
        stream = await connect_direct(HOST, links.offer("anna"), peer="x")
        assert await stream.receive() == b"anna"
        stream.close()

    with_links(test)


def test_frames_with_another_key_are_rejected() -> None:
    async def test(links: DirectLinks) -> None:
        offer = links.offer("anna")
        wrong = offer.model_copy(update={"keys": (offer.keys[0], "00" * 32)})
        with pytest.raises(StreamBroken, match="fails authentication"):
            await connect_direct(HOST, wrong, peer="x")

    with_links(test)


def test_connecting_fails_if_no_peer_listens_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "CONNECT_S", 1.0)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]

        async def mute() -> None:
            with pytest.raises(StreamBroken, match="timed out after 1 s"):
                await connect_direct(HOST, offer(port), peer="x")

        asyncio.run(mute())

    async def no_listener() -> None:
        with pytest.raises(StreamBroken, match="no direct link"):
            await connect_direct(HOST, offer(port), peer="x")
        with pytest.raises(StreamBroken, match="offers no direct link"):
            await connect_direct(HOST, LinkOffer(port=0, token="", keys=()), peer="x")

    asyncio.run(no_listener())


def test_no_offers_if_the_port_is_taken() -> None:
    async def test() -> None:
        with socket.create_server((HOST, 0)) as listener:
            links = DirectLinks(echo, Log("test"))
            await links.listen(HOST, listener.getsockname()[1])
            assert links.offer("anna").port == 0
            links.close()

    asyncio.run(test())


def test_golden_vector_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire" / "diloco.md").read_text()
    frames = bytes.fromhex(page.split("```")[1].replace("\n", ""))

    async def test() -> None:
        ours, theirs = socket.socketpair()
        key = bytes(range(32))
        streams = [
            EncryptedStream(*await asyncio.open_connection(sock=end), peer="", send_key=key, receive_key=key)
            for end in (ours, theirs)
        ]
        for payload in (b"shoal link", b"one"):
            await streams[0].send(payload)
            assert await streams[1].receive() == payload
        for stream in streams:
            stream.close()
        first, second = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=first)
        reader = EncryptedStream(
            *await asyncio.open_connection(sock=second), peer="", send_key=key, receive_key=key
        )
        writer.write(frames)
        assert [await reader.receive() for _ in range(2)] == [b"shoal link", b"one"]
        writer.close()
        reader.close()
        await asyncio.sleep(0.05)

    asyncio.run(test())


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)])
def test_reordered_repeated_or_missing_frame_is_rejected(order: tuple[int, ...]) -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        sender = EncryptedStream(
            *await asyncio.open_connection(sock=ours), peer="", send_key=bytes(32), receive_key=bytes(32)
        )
        reader, raw = await asyncio.open_connection(sock=theirs)
        frames = []
        for payload in (b"one", b"two"):
            await sender.send(payload)
            frames.append(await reader.readexactly(36 + len(payload) + 16))
        first, second = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=first)
        receiver = EncryptedStream(
            *await asyncio.open_connection(sock=second), peer="", send_key=bytes(32), receive_key=bytes(32)
        )
        for at in order:
            writer.write(frames[at])
        with pytest.raises(StreamBroken, match="fails authentication"):
            for _ in order:
                await receiver.receive()
        for each in (sender, receiver, raw, writer):
            each.close()
        await asyncio.sleep(0.05)

    asyncio.run(test())


@pytest.mark.parametrize(
    "payload",
    [b"noise", b"{}", b'{"port":1,"token":"","keys":[]}', b'{"port":70000,"token":"","keys":[]}'],
)
def test_malformed_offer_is_refused(payload: bytes) -> None:
    with pytest.raises(Rejected, match="LinkOffer"):
        LinkOffer.parse(payload)


def test_no_stream_is_opened_while_the_network_daemon_is_replaced() -> None:
    """A round that asks a peer meanwhile fails and is tried again; it must not end the training."""
    peer = HivemindMesh("run", PeerAddress())
    with pytest.raises(StreamBroken, match="daemon is not running"):
        asyncio.run(peer.open("someone"))


def offer(port: int) -> LinkOffer:
    return LinkOffer(port=port, token="00" * 16, keys=("00" * 32, "11" * 32))
