"""`shoal diloco`: train with others over slow links, and the rendezvous where they find each other."""

import argparse
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import Commands
from shoal.cli.run.supervise import EXIT_OK, alone_in
from shoal.cli.ui.values import at_least_one, count, port_number, seconds
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log

if TYPE_CHECKING:
    from shoal.diloco.site.diloco_file import DilocoFile
    from shoal.diloco.transport.hivemind_mesh import PeerAddress
    from shoal.trainer.config import DilocoConfig


_ANY = ("0.0.0.0", "::")
"""To listen at, not to be reached by."""


def add_diloco(commands: Commands) -> None:
    parser = commands.add_parser("diloco", help="pre-train or fine-tune over slow links")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    train = actions.add_parser("train", help="train at this site, with whoever else joins the run")
    train.add_argument("file", type=Path, metavar="FILE.toml")
    train.add_argument("--dir", type=Path, required=True, help="this site's folder; start again to resume")
    train.add_argument("--device", default="cpu", help="cpu, or cuda")
    train.add_argument(
        "--threads", type=count, default=0, help="torch threads (default: 0, torch's own choice)"
    )
    train.add_argument("--join-s", type=seconds, default=600.0, help="how long to look for the swarm")
    _add_address_options(train, port=0)
    train.set_defaults(action=_train)
    swarm = actions.add_parser("swarm", help="a rendezvous: an address that peers can join by")
    swarm.add_argument("--run", default="", help="name of a run whose peers to show")
    swarm.add_argument("--dir", type=Path, required=True, help="keeps the key behind the address")
    swarm.add_argument("--engine", choices=["hivemind", "torchft"], default="hivemind")
    swarm.add_argument("--min-peers", type=at_least_one, default=1, help="torchft: no round with fewer")
    swarm.add_argument("--gather-s", type=seconds, default=60.0, help="torchft: wait so long for the others")
    _add_address_options(swarm, port=8710)
    swarm.set_defaults(action=_swarm)


def _add_address_options(parser: argparse.ArgumentParser, *, port: int) -> None:
    parser.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a peer or rendezvous of the run, such as /ip4/203.0.113.5/tcp/8710/p2p/Qm...; one is enough",
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached from elsewhere")
    parser.add_argument("--port", type=port_number, default=port, help="0 takes any free one")
    parser.add_argument(
        "--announce", action="append", default=[], help="the address that others should use, if it is another"
    )
    parser.add_argument(
        "--direct-port",
        type=port_number,
        default=0,
        help="for vectors, around the daemon; 0 takes any free one",
    )
    parser.add_argument("--outbound-only", action="store_true", help="listen nowhere; only reach out")
    parser.add_argument("--relay", action="store_true", help="behind NAT: be reached through other peers")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop when standard input ends")


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Of a trainer that is one of several sites: beside its own --host and --port, those that the other sites see."""
    group = parser.add_argument_group("with [trainer.diloco]")
    group.add_argument(
        "--peer-join",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="another site, or a rendezvous (shoal diloco swarm); none: the first",
    )
    group.add_argument("--peer-host", default="127.0.0.1", help="0.0.0.0 to be reached from elsewhere")
    group.add_argument("--peer-port", type=port_number, default=0, help="0 takes any free one")
    group.add_argument(
        "--peer-direct-port",
        type=port_number,
        default=0,
        help="for vectors, around the daemon; 0 takes any free one",
    )
    group.add_argument("--peer-announce", action="append", default=[], metavar="ADDRESS")
    group.add_argument(
        "--outbound-only", action="store_true", help="listen nowhere for other sites; only reach out"
    )


def _address(options: argparse.Namespace) -> "PeerAddress":
    from shoal.diloco.transport.hivemind_mesh import PeerAddress

    _check_addresses("--join", options.join)
    return PeerAddress(
        join=tuple(options.join),
        host=options.host,
        port=options.port,
        direct_port=options.direct_port,
        announce=tuple(options.announce),
        reachable=not options.outbound_only,
        relay=options.relay,
        identity=options.dir / "peer.key",
    )


def check_peer_join(addresses: Sequence[str], config: "DilocoConfig | None") -> None:
    """`config`: the run file's [trainer.diloco], if it has one."""
    if addresses and config is None:
        raise ValueError(
            f"--peer-join {addresses[0]}: the run file has no [trainer.diloco], so its trainer merges with nobody; "
            "add that section, or leave the option out"
        )
    if config is not None and config.engine == "hivemind":
        _check_addresses("--peer-join", addresses)


def _check_addresses(option: str, addresses: Sequence[str]) -> None:
    for address in addresses:
        if not address.startswith("/") or "/p2p/" not in address:
            raise ValueError(
                f"{option} {address!r} is no address of a peer; one looks like /ip4/203.0.113.5/tcp/8710/p2p/Qm..., as "
                "`shoal diloco swarm` and every site print it"
            )


def _train(options: argparse.Namespace, stop: threading.Event) -> int:
    import torch

    from shoal.cli.run.roles import check_device
    from shoal.diloco.site.diloco_file import load_diloco_file

    file = load_diloco_file(options.file)
    check_device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    options.dir.mkdir(parents=True, exist_ok=True)
    with alone_in(options.dir, stop):
        return _train_alone_there(file, options, stop)


def _train_alone_there(file: "DilocoFile", options: argparse.Namespace, stop: threading.Event) -> int:
    from rich.console import Console

    from shoal.cli.ui.diloco_view import LiveView, show_site
    from shoal.diloco.averaging.averager import RoundFailed
    from shoal.diloco.site.site import Site
    from shoal.diloco.transport.stream import StreamBroken

    averager = _engine(file, options, stop)
    site = Site(
        file,
        averager,
        folder=options.dir,
        device=options.device,
        peer=_site_id(options.dir),
        stop=stop,
    )
    console = Console(stderr=True, highlight=False)
    try:
        with LiveView(console, lambda: show_site(file, site.progress, averager)):
            progress = site.train(join_s=options.join_s)
    except (RoundFailed, StreamBroken) as error:
        raise DeadlinePassed(f"the swarm: {error}") from None
    finally:
        site.close()
        _draw(options.dir, f"{file.run.name}: loss")
    print(
        f"run {file.run.name}: {progress.steps} steps, validation loss {progress.validation:.4f}, "
        f"{progress.sent_bytes / 1e6:.1f} MB sent, utilisation {progress.utilisation:.3f}; model in {site.model_folder}"
    )
    return EXIT_OK


def _draw(dir: Path, title: str) -> None:
    from shoal.cli.ui.diloco_view import plot_losses

    try:
        plot_losses(dir / "metrics.jsonl", dir / "loss.png", title)
    except OSError as error:  # whatever else went wrong is the news
        Log("site").warning("no picture of the losses", reason=error)


def _engine(file: "DilocoFile", options: argparse.Namespace, stop: threading.Event) -> Any:
    from shoal.diloco.averaging.peers import AveragerSettings, PeerAverager
    from shoal.diloco.transport.mesh import LocalHub, Mesh

    rounds = file.rounds
    mesh: Mesh
    if file.run.engine == "torchft":
        return _torchft(file, options, stop)
    if file.run.engine == "local":
        if options.join:
            raise ValueError(
                f'--join {options.join[0]}: run.engine = "local" trains alone; take hivemind or torchft'
            )
        mesh = LocalHub().mesh()
    else:
        from shoal.diloco.transport.hivemind_mesh import HivemindMesh

        mesh = HivemindMesh(file.run.name, _address(options))
    return PeerAverager(
        mesh,
        log=Log("averager"),
        codec=rounds.codec,
        settings=AveragerSettings(gather_s=rounds.gather_s, min_peers=rounds.min_peers, shared=file.shared()),
        stop=stop,
    )


def _torchft(file: "DilocoFile", options: argparse.Namespace, stop: threading.Event) -> Any:
    from shoal.diloco.averaging.torchft_averager import TorchftAverager

    if len(options.join) != 1:
        raise ValueError(
            'with engine = "torchft" give one --join: the lighthouse, such as http://10.0.0.1:8710'
        )
    return TorchftAverager(
        options.join[0],
        log=Log("averager"),
        codec=file.rounds.codec,
        host=options.host,
        min_peers=file.rounds.min_peers,
        stop=stop,
    )


def _site_id(folder: Path) -> str:
    """What this site's order of the data is drawn from; the same after a restart."""
    path = folder / "site.id"
    if not path.exists():
        path.write_text(secrets.token_hex(16) + "\n")
    return path.read_text().strip()


def _swarm(options: argparse.Namespace, stop: threading.Event) -> int:
    import asyncio

    options.dir.mkdir(parents=True, exist_ok=True)
    with alone_in(options.dir, stop):
        if options.engine == "torchft":
            return _lighthouse(options, stop)
        return asyncio.run(_rendezvous(options, stop))


def _lighthouse(options: argparse.Namespace, stop: threading.Event) -> int:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{options.host}:{options.port}",
        min_replicas=options.min_peers,
        join_timeout_ms=int(1000 * options.gather_s),
    )
    # It names the machine, which others may not resolve; the address it was given is better, if it is one.
    named, port = server.address().rsplit(":", 1)
    host = named.removeprefix("http://") if options.host in _ANY else options.host
    print(f"join: http://{host}:{port}", flush=True)
    stop.wait()
    server.shutdown()
    return EXIT_OK


async def _rendezvous(options: argparse.Namespace, stop: threading.Event) -> int:
    import asyncio

    from shoal.cli.ui.diloco_view import describe_peers
    from shoal.diloco.transport.hivemind_mesh import HivemindMesh
    from shoal.diloco.transport.stream import Stream, StreamBroken

    async def refuse(stream: Stream) -> None:
        """A rendezvous takes part in nothing."""

    mesh = HivemindMesh(options.run or "rendezvous", replace(_address(options), direct_port=None))
    try:
        await mesh.start(refuse)
    except StreamBroken as broken:
        raise DeadlinePassed(str(broken)) from None
    for address in mesh.addresses:
        print(f"join: {address}", flush=True)
    said: list[str] = []
    try:
        while not stop.is_set():
            await asyncio.sleep(0.5)
            peers = describe_peers(await mesh.cards()) if options.run else []
            if peers != said:
                said = peers
                print(f"{time.strftime('%H:%M:%S')} {len(peers)} peers", *peers, sep="\n  ", flush=True)
    finally:
        await mesh.stop()
    return EXIT_OK
