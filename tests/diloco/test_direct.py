"""Links around the daemon, on loopback: sealed both ways, for one peer, once; whatever else calls is turned away."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shoal.diloco.averaging.peer_messages import LinkOffer
from shoal.diloco.transport import direct_mesh
from shoal.diloco.transport.direct_mesh import DirectLinks, dial, parse_offer
from shoal.diloco.transport.encrypted_stream import SealedStream
from shoal.diloco.transport.stream import Broken, Stream
from shoal.telemetry import Log

HOST = "127.0.0.1"
LARGE = bytes(range(256)) * 8192


async def echo(stream: Stream) -> None:
    """Says who calls, then every frame again."""
    await stream.send(stream.peer.encode())
    try:
        while True:
            await stream.send(await stream.receive())
    except Broken:
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
            await asyncio.sleep(0.05)  # transports close on the loop's next turns

    asyncio.run(run())


def test_frames_go_both_ways_and_the_peer_is_the_one_that_was_offered_it() -> None:
    async def test(links: DirectLinks) -> None:
        stream = await dial(HOST, parse_offer(links.offer("anna").canonical()), peer="bert")
        assert await stream.receive() == b"anna" and stream.peer == "bert"
        for payload in (b"", b"x", LARGE):
            await stream.send(payload)
            assert await stream.receive() == payload
        stream.close()

    with_links(test)


def test_an_offer_is_good_once_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(links: DirectLinks) -> None:
        offer = links.offer("anna")
        (await dial(HOST, offer, peer="x")).close()
        with pytest.raises(Broken, match="no direct link to 127"):
            await dial(HOST, offer, peer="x")
        monkeypatch.setattr(direct_mesh, "OFFER_S", -1.0)
        with pytest.raises(Broken):
            await dial(HOST, links.offer("anna"), peer="x")

    with_links(test)


def test_noise_and_silence_are_turned_away_and_others_still_get_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct_mesh, "DIAL_S", 0.5)

    async def test(links: DirectLinks) -> None:
        port = links.offer("anna").port
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"", b"short"):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(noise)
            assert await reader.read() == b"", "hung up on without a word"
            writer.close()
        monkeypatch.setattr(direct_mesh, "DIAL_S", 10.0)
        stream = await dial(HOST, links.offer("anna"), peer="x")
        assert await stream.receive() == b"anna"
        stream.close()

    with_links(test)


def test_another_key_opens_nothing() -> None:
    async def test(links: DirectLinks) -> None:
        offer = links.offer("anna")
        wrong = offer.model_copy(update={"keys": (offer.keys[0], "00" * 32)})
        with pytest.raises(Broken, match="did not seal"):
            await dial(HOST, wrong, peer="x")

    with_links(test)


def test_a_port_where_nobody_or_somebody_else_listens_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_mesh, "DIAL_S", 1.0)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]

        async def mute() -> None:
            with pytest.raises(Broken, match="1 s"):
                await dial(HOST, offer(port), peer="x")

        asyncio.run(mute())

    async def nobody() -> None:
        with pytest.raises(Broken, match="no direct link"):
            await dial(HOST, offer(port), peer="x")
        with pytest.raises(Broken, match="offers no direct link"):
            await dial(HOST, LinkOffer(port=0, token="", keys=()), peer="x")

    asyncio.run(nobody())


def test_a_taken_port_means_no_offers() -> None:
    async def test() -> None:
        with socket.create_server((HOST, 0)) as listener:
            links = DirectLinks(echo, Log("test"))
            await links.listen(HOST, listener.getsockname()[1])
            assert links.offer("anna").port == 0
            links.close()

    asyncio.run(test())


def test_the_golden_vector() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire" / "diloco.md").read_text()
    frames = bytes.fromhex(page.split("```")[1].replace("\n", ""))

    async def test() -> None:
        ours, theirs = socket.socketpair()
        key = bytes(range(32))
        streams = [
            SealedStream(*await asyncio.open_connection(sock=end), peer="", seals=key, opens=key)
            for end in (ours, theirs)
        ]
        for payload in (b"shoal link", b"one"):
            await streams[0].send(payload)
            assert await streams[1].receive() == payload
        for stream in streams:
            stream.close()
        first, second = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=first)
        reader = SealedStream(*await asyncio.open_connection(sock=second), peer="", seals=key, opens=key)
        writer.write(frames)
        assert [await reader.receive() for _ in range(2)] == [b"shoal link", b"one"]
        writer.close()
        reader.close()
        await asyncio.sleep(0.05)

    asyncio.run(test())


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (1,)])
def test_a_frame_moved_repeated_or_left_out_does_not_open(order: tuple[int, ...]) -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        sender = SealedStream(
            *await asyncio.open_connection(sock=ours), peer="", seals=bytes(32), opens=bytes(32)
        )
        reader, raw = await asyncio.open_connection(sock=theirs)
        frames = []
        for payload in (b"one", b"two"):
            await sender.send(payload)
            frames.append(await reader.readexactly(36 + len(payload) + 16))
        first, second = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=first)
        receiver = SealedStream(
            *await asyncio.open_connection(sock=second), peer="", seals=bytes(32), opens=bytes(32)
        )
        for at in order:
            writer.write(frames[at])
        with pytest.raises(Broken, match="did not seal"):
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
def test_an_offer_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(Broken, match="an offer that is none"):
        parse_offer(payload)


def offer(port: int) -> LinkOffer:
    return LinkOffer(port=port, token="00" * 16, keys=("00" * 32, "11" * 32))
