"""`shoal diloco train` trains at one site together with others over slow links; `shoal diloco swarm` is their rendezvous."""

import argparse
import contextlib
import ipaddress
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.run.supervise import EXIT_INTERRUPTED, EXIT_OK, lock_folder
from shoal.cli.ui.values import (
    Commands,
    Options,
    add_command,
    add_device,
    add_flag,
    add_host,
    add_list,
    add_port,
    add_stop_with_stdin,
    add_subcommands,
    add_threads,
    add_value,
    at_least_one,
    device_of_rank,
    seconds,
    use_device,
)
from shoal.files import write_bytes_atomically
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log, printable

if TYPE_CHECKING:
    from rich.console import Group

    from shoal.diloco.ranks import Ranks
    from shoal.diloco.site.diloco_file import DilocoFile
    from shoal.diloco.site.site import Site, SiteProgress
    from shoal.diloco.transport.hivemind_mesh import PeerAddress
    from shoal.trainer.config import DilocoConfig


_ANY = ("0.0.0.0", "::")
"""Addresses that a process can listen on but that nobody can connect to."""


def add_diloco(commands: Commands) -> None:
    actions = add_subcommands(commands, "diloco", "pre-train or fine-tune over slow links")
    train = add_command(
        actions, "train", "train at this site, together with the other sites of the run", _train
    )
    train.add_argument("file", type=Path, metavar="FILE.toml")
    train.add_argument(
        "--dir", type=Path, required=True, help="this site's folder; the same command resumes after a stop"
    )
    add_device(train)
    add_threads(train)
    add_value(train, "--join-s", seconds, 600.0, "seconds to look for other peers")
    _add_address_options(train, port=0)
    swarm = add_command(
        actions, "swarm", "serve a rendezvous: an address at which peers find each other", _swarm
    )
    swarm.add_argument("--run", default="", help="name of a run whose peers are listed")
    swarm.add_argument("--dir", type=Path, required=True, help="folder for the key that the address contains")
    swarm.add_argument("--engine", choices=["hivemind", "torchft"], default="hivemind")
    add_value(swarm, "--min-peers", at_least_one, 1, "torchft: fewest peers of a round")
    add_value(swarm, "--gather-s", seconds, 60.0, "torchft: seconds to wait for the other peers")
    _add_address_options(swarm, port=8710)
    words = "print the peer id of a folder, for the key `admit` of the file"
    peer_id = add_command(actions, "id", words, _print_id)
    words = "a site's folder; makes its key if there is none"
    peer_id.add_argument("--dir", type=Path, required=True, help=words)


def _add_address_options(parser: Options, *, port: int) -> None:
    words = "a peer or rendezvous of the run, such as /ip4/203.0.113.5/tcp/8710/p2p/Qm...; one is enough"
    add_peer_addresses(parser, port=port, join=words)
    add_flag(parser, "--relay", "behind NAT: let other peers forward connections")
    add_stop_with_stdin(parser)


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a trainer that is one of several sites: the addresses that the other sites use."""
    group = parser.add_argument_group("with [trainer.diloco]")
    words = "address of another site or of a rendezvous (shoal diloco swarm); the first site needs none"
    add_peer_addresses(group, port=0, prefix="peer-", join=words)
    words = "id of a site that may take part (shoal diloco id), this one included; give all; default: any"
    add_list(group, "--peer-admit", "ID", words)


def add_peer_addresses(parser: Options, *, port: int, join: str, prefix: str = "") -> None:
    """Adds the options that `peer_address` reads; `join` is the help of --join."""
    add_list(parser, f"--{prefix}join", "ADDRESS", join)
    add_host(parser, "address to listen on; 0.0.0.0 for other machines", f"--{prefix}host")
    add_port(parser, port, f"--{prefix}port")
    words = "the address that others should use, if it is a different one"
    add_list(parser, f"--{prefix}announce", "ADDRESS", words)
    add_port(parser, 0, f"--{prefix}direct-port", "port for vectors, which do not pass the daemon; ")
    add_flag(parser, "--outbound-only", "listen nowhere; only make outgoing connections")


def peer_address(options: argparse.Namespace, prefix: str = "") -> "PeerAddress":
    """Returns the address that the options of `add_peer_addresses` describe."""
    from shoal.diloco.transport.hivemind_mesh import PeerAddress

    given = {name: getattr(options, f"{prefix}{name}") for name in ("host", "port", "direct_port")}
    return PeerAddress(
        **given,
        join=tuple(getattr(options, f"{prefix}join")),
        announce=tuple(getattr(options, f"{prefix}announce")),
        reachable=not options.outbound_only,
        identity=options.dir / "peer.key",
    )


def _address(options: argparse.Namespace) -> "PeerAddress":
    _check_addresses("--join", options.join)
    return replace(peer_address(options), relay=options.relay)


def check_peer_join(addresses: Sequence[str], config: "DilocoConfig | None") -> None:
    """Raises ValueError for addresses that do not fit `config`, the run file's [trainer.diloco] or None."""
    if addresses and config is None:
        raise ValueError(
            f"--peer-join {addresses[0]}: the run file has no [trainer.diloco], so its trainer is the only site; "
            "add that section, or leave the option out"
        )
    if config is not None and config.engine == "hivemind":
        _check_addresses("--peer-join", addresses)


def _check_addresses(option: str, addresses: Sequence[str]) -> None:
    for address in addresses:
        if not address.startswith("/") or "/p2p/" not in address:
            raise ValueError(
                f"{option} {address!r} is not the address of a peer; one looks like /ip4/203.0.113.5/tcp/8710/p2p/Qm..., as "
                "`shoal diloco swarm` and every site print it"
            )


def _train(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.diloco.site.diloco_file import load_diloco_file

    file = load_diloco_file(options.file)
    ranks = _join_ranks(file, options)
    use_device(options)
    options.dir.mkdir(parents=True, exist_ok=True)
    if ranks.leads and ranks.size > 1:
        _site_id(options.dir)  # the other ranks read it
    ranks.wait_for_all()
    if ranks.leads:
        with lock_folder(options.dir, stop):
            _lead(file, options, stop, ranks)
    else:
        _make_site(file, None, options, stop, ranks).follow()
    ranks.leave()
    ranks.release()
    return EXIT_OK


def _join_ranks(file: "DilocoFile", options: argparse.Namespace) -> "Ranks":
    """Connects the processes that torchrun started for this site."""
    from shoal.diloco.ranks import join_ranks

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > file.inner.batch:
        raise ValueError(
            f"{size} ranks for inner.batch = {file.inner.batch} samples: some would have none; start at most {file.inner.batch}"
        )
    options.device = device_of_rank(options.device)
    timeout_s = max(options.join_s, 3 * file.rounds.deadline_s) + 60
    return join_ranks(rank=rank, size=size, device=options.device, command_timeout_s=timeout_s)


def _make_site(
    file: "DilocoFile", averager: Any, options: argparse.Namespace, stop: threading.Event, ranks: "Ranks"
) -> "Site":
    from shoal.diloco.site.site import Site

    peer = _site_id(options.dir)
    return Site(file, averager, folder=options.dir, device=options.device, peer=peer, stop=stop, ranks=ranks)


def _lead(file: "DilocoFile", options: argparse.Namespace, stop: threading.Event, ranks: "Ranks") -> None:
    """Trains as the rank that talks to the other sites, in a locked folder."""
    from rich.console import Console
    from rich.live import Live

    from shoal.diloco.averaging.averager import RoundFailed
    from shoal.diloco.transport.stream import StreamBroken

    averager = _engine(file, options, stop)
    site = _make_site(file, averager, options, stop, ranks)
    console = Console(stderr=True, highlight=False)
    # At a terminal a thread redraws the state, because a round may take minutes; elsewhere the log is enough.
    view = (
        Live(console=console, get_renderable=lambda: show_site(file, site.progress, averager))
        if console.is_terminal
        else contextlib.nullcontext()
    )
    try:
        with view:
            progress = site.train(join_s=options.join_s)
    except (RoundFailed, StreamBroken) as error:
        raise DeadlinePassed(f"the swarm: {error}") from None
    finally:
        site.close()
        _plot(options.dir, f"{file.run.name}: loss")
    print(
        f"run {file.run.name}: {progress.steps} steps, validation loss {progress.validation:.4f}, "
        f"{progress.sent_bytes / 1e6:.1f} MB sent, utilisation {progress.utilisation:.3f}; model in {site.model_folder}"
    )


def _plot(dir: Path, title: str) -> None:
    from shoal.cli.ui.plot import plot_losses

    try:
        plot_losses(dir / "metrics.jsonl", dir / "loss.png", title)
    except OSError as error:  # must not hide an error of the training itself
        Log("site").warning("could not plot the losses", reason=error)


def _engine(file: "DilocoFile", options: argparse.Namespace, stop: threading.Event) -> Any:
    from shoal.diloco.averaging.averager import AveragerSettings
    from shoal.diloco.averaging.peers import PeerAverager
    from shoal.diloco.transport.mesh import LocalHub, Mesh

    rounds = file.rounds
    mesh: Mesh
    if file.run.engine == "torchft":
        from shoal.diloco.averaging.torchft_averager import TorchftAverager

        if len(options.join) != 1:
            raise ValueError(
                'with engine = "torchft" give one --join: the lighthouse, such as http://10.0.0.1:8710'
            )
        return TorchftAverager(
            options.join[0],
            log=Log("averager"),
            codec=rounds.codec,
            host=options.host,
            min_peers=rounds.min_peers,
            robust=file.robust(),
            stop=stop,
        )
    if file.run.engine == "local":
        if options.join:
            raise ValueError(
                f'--join {options.join[0]}: run.engine = "local" trains alone; set hivemind or torchft'
            )
        mesh = LocalHub().mesh()
    else:
        from shoal.diloco.transport.hivemind_mesh import HivemindMesh

        mesh = HivemindMesh(file.run.name, _address(options))
    return PeerAverager(
        mesh,
        log=Log("averager"),
        codec=rounds.codec,
        settings=AveragerSettings(
            gather_s=rounds.gather_s,
            min_peers=rounds.min_peers,
            shared=file.shared(),
            robust=file.robust(),
            admit=frozenset(rounds.admit) or None,
        ),
        stop=stop,
    )


def _site_id(folder: Path) -> str:
    """Returns the random id that decides this site's order of the data. It stays the same after a restart."""
    path = folder / "site.id"
    if not path.exists():
        write_bytes_atomically(path, f"{secrets.token_hex(16)}\n".encode())
    return path.read_text().strip()


def _print_id(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.diloco.transport.hivemind_mesh import peer_id

    options.dir.mkdir(parents=True, exist_ok=True)
    print(peer_id(options.dir / "peer.key"))
    return EXIT_OK


def _swarm(options: argparse.Namespace, stop: threading.Event) -> int:
    import asyncio

    options.dir.mkdir(parents=True, exist_ok=True)
    with lock_folder(options.dir, stop):
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
    # The server reports the machine's name, which others may not resolve; use the given address instead, if it is one.
    named, port = server.address().rsplit(":", 1)
    host = named.removeprefix("http://") if options.host in _ANY else options.host
    print(f"join: http://{host}:{port}", flush=True)
    stop.wait()
    server.shutdown()
    return EXIT_INTERRUPTED


async def _rendezvous(options: argparse.Namespace, stop: threading.Event) -> int:
    import asyncio

    from shoal.diloco.transport.hivemind_mesh import HivemindMesh
    from shoal.diloco.transport.stream import Stream, StreamBroken

    async def refuse(stream: Stream) -> None:
        """Ignores streams: a rendezvous takes no part in rounds."""

    mesh = HivemindMesh(options.run or "rendezvous", replace(_address(options), direct_port=None))
    try:
        await mesh.start(refuse)
    except StreamBroken as broken:
        raise DeadlinePassed(str(broken)) from None
    for address in mesh.addresses:
        print(f"join: {address}   # {reach_of(address)}", flush=True)
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
    return EXIT_INTERRUPTED


# -- what is shown ------------------------------------------------------------------------------------------


def reach_of(address: str) -> str:
    """Returns from where a libp2p address can be joined, in words."""
    try:
        ip = ipaddress.ip_address(address.split("/")[2])
    except (IndexError, ValueError):
        return "from where this name is known"
    if ip.is_loopback:
        return "from this machine"
    return "from this network" if ip.is_private else "from anywhere"


def describe_peers(cards: dict[str, bytes]) -> list[str]:
    """Returns one line per peer of a directory, which every peer writes into."""
    from shoal.diloco.averaging.peer_messages import Card
    from shoal.wire.codes import Rejected

    lines = []
    for peer, payload in sorted(cards.items()):
        try:
            card = Card.parse(payload)
        except Rejected:
            continue
        held = card.standing
        where = "no state yet" if held is None else f"round {held.round}, state {held.state_digest[:8]}"
        lines.append(f"{printable(peer[-10:])}  {where}{'' if card.reachable else ', outbound only'}")
    return lines


def show_site(file: "DilocoFile", progress: "SiteProgress", averager: Any) -> "Group":
    """Returns the site's progress, its last round, and the other peers."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    own = Table(title=f"{file.run.name} at this site", show_header=False)
    report = progress.last_round
    rows = {
        "step": f"{progress.steps} of {progress.last_step}",
        "loss": "" if math.isnan(progress.loss) else f"{progress.loss:.4f}",
        "validation loss": "" if math.isnan(progress.validation) else f"{progress.validation:.4f}",
        "utilisation": "" if math.isnan(progress.utilisation) else f"{100 * progress.utilisation:.1f} %",
        "sent": f"{progress.sent_bytes / 1e6:.1f} MB",
    }
    if report is not None:
        result = report.result
        speed = 8e-6 * result.num_bytes / result.took_s if result.took_s else 0.0
        rows["last round"] = (
            f"{report.round}: {result.outcome.name.lower()}, {len(result.members)} peers, "
            f"{result.took_s:.2f} s, {speed:.0f} Mbit/s, waited {report.waited_s:.2f} s"
        )
    for name, value in rows.items():
        own.add_row(name, value)
    others = Table("peer", "round", "steps since", "state", title="other peers")
    for peer, card in sorted(getattr(averager, "peers", dict)().items()):
        held = card.standing
        others.add_row(
            Text(printable(peer[-10:])),
            "" if held is None else str(held.round),
            "in a round" if card.in_round else str(card.phase),
            "" if held is None else held.state_digest[:8],
        )
    return Group(own, others)
