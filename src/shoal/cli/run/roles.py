"""One role each: what the command line says becomes the role's own configuration."""

import argparse
import os
import threading
from collections.abc import Mapping

from shoal.cli.commands.diloco import check_peer_join
from shoal.cli.run.runfile import load_run_file
from shoal.cli.run.supervise import EXIT_EJECTED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from shoal.net.s3_store import Credentials
from shoal.telemetry import Log
from shoal.wire.keys import Key


def coordinator(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.swarm.coordinator.http.server import Hosting, run_pool

    files = [load_run_file(path) for path in options.files]
    if options.database and len(files) > 1:
        raise ValueError("--database is for one run; with several, each run file names its own database")
    credentials = _credentials(os.environ)
    runs = [
        Hosting(
            config=file.coordinator.model_copy(update={"database": options.database})
            if options.database
            else file.coordinator,
            spec=file.spec(),
            dir=options.dir / file.run.name if len(files) > 1 else options.dir,
            credentials=credentials,
        )
        for file in files
    ]
    run_pool(runs, options.host, options.port, stop)
    return _left(stop)


def _credentials(environ: Mapping[str, str]) -> Credentials | None:
    """Of an object store, by the names that every tool for such stores uses."""
    access, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        return None
    token = environ.get("AWS_SESSION_TOKEN", "")
    return Credentials(access_key=access, secret_key=secret, session_token=token)


def trainer(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.diloco.transport.hivemind_mesh import PeerAddress
    from shoal.trainer.io.publisher import OriginAddress
    from shoal.trainer.loop import TrainerSite, run_trainer

    device = _own_device(options.device)
    check_device(device)
    _check_reachable(options)
    file = load_run_file(options.file)
    check_peer_join(options.peer_join, file.trainer.diloco)
    site = TrainerSite(
        folder=options.dir,
        model=file.run.model,
        coordinator_url=options.coordinator,
        key=Key.load(options.keys / "trainer.key"),
        run_key=Key.load(options.keys / "run.key"),
        address=OriginAddress(
            host=options.host, port=options.port, url=options.url, private=file.shardcast.private
        ),
        device=device,
        num_threads=options.threads,
        deadline_s=options.deadline_s,
        shard_bytes=file.shardcast.shard_bytes,
        snapshot_every=file.shardcast.snapshot_every,
        peer=PeerAddress(
            join=tuple(options.peer_join),
            host=options.peer_host,
            port=options.peer_port,
            direct_port=options.peer_direct_port,
            announce=tuple(options.peer_announce),
            reachable=not options.outbound_only,
            identity=options.dir / "peer.key",
        ),
        rank=int(os.environ.get("RANK", "0")),  # these two are torchrun's
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
    )
    run_trainer(file.trainer, site, stop=stop)
    return _left(stop)


def relay(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.shardcast import RelayConfig, run_relay

    _check_reachable(options)
    key = Key.load(options.key)
    config = RelayConfig(
        folder=options.dir,
        coordinator=options.coordinator,
        upstreams=tuple(options.upstream),
        host=options.host,
        port=options.port,
        url=options.url,
        max_bytes=None if options.max_gb is None else int(options.max_gb * 1e9),
        max_connections=options.max_connections,
        max_connections_per_address=options.max_connections_per_address,
        bytes_per_s_per_address=None if options.mb_per_s is None else options.mb_per_s * 1e6,
        deadline_s=options.deadline_s,
        private=options.private,
    )
    run_relay(config, key=key, log=Log("relay"), stop=stop)
    return _left(stop)


def wait_quietly() -> None:
    """Before torch is imported. Its threads wait for each other in a loop; where other programs want the same cores, each waits
    for one that is not running, and a lease takes many times as long. With this they soon sleep; at once, as OMP_WAIT_POLICY=PASSIVE
    has it, would cost 40 % on a machine that has nothing else to do. An owner's own setting stands."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def worker(options: argparse.Namespace, stop: threading.Event) -> int:
    wait_quietly()
    from shoal.rollout.engine.factory import check_engine
    from shoal.rollout.worker.session import Exit
    from shoal.rollout.worker.worker import WorkerConfig, run_worker

    check_device(options.device)
    check_engine(options.engine, device=options.device, tensor_parallel=options.tensor_parallel)
    config = WorkerConfig(
        coordinator=options.coordinator,
        dir=options.dir,
        engine=options.engine,
        device=options.device,
        tensor_parallel=options.tensor_parallel,
        max_rows=options.max_rows,
        num_threads=options.threads,
        deadline_s=options.deadline_s,
        prefetch=not options.no_prefetch,
        lie=options.lie,
    )
    codes = {
        Exit.FINISHED: EXIT_OK,
        Exit.LEFT: EXIT_OK,
        Exit.STOPPED: EXIT_INTERRUPTED,
        Exit.EJECTED: EXIT_EJECTED,
    }
    return codes.get(run_worker(config, stop=stop), EXIT_FAILED)


def validator(options: argparse.Namespace, stop: threading.Event) -> int:
    wait_quietly()
    from shoal.swarm.validator.claim_loop import ValidatorConfig, run_validator

    check_device(options.device)
    config = ValidatorConfig(
        coordinator=options.coordinator,
        key=options.key,
        dir=options.dir,
        device=options.device,
        num_threads=options.threads,
        deadline_s=options.deadline_s,
    )
    run_validator(config, stop=stop)
    return _left(stop)


def _left(stop: threading.Event) -> int:
    """A role that was told to stop has not finished: whoever supervises it may want it back."""
    return EXIT_INTERRUPTED if stop.is_set() else EXIT_OK


def _own_device(name: str) -> str:
    """Of several processes on a host, started by torchrun, each takes the GPU of its number."""
    if name != "cuda" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return name
    return f"cuda:{os.environ['LOCAL_RANK']}"


def check_device(name: str) -> None:
    """Now, and not after minutes of waiting for others."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: torch {torch.__version__} finds no CUDA device here; use --device cpu"
        )


def _check_reachable(options: argparse.Namespace) -> None:
    if options.url is None and options.host in ("0.0.0.0", "::"):
        raise ValueError(
            f"--host {options.host} is every address of this machine; say with --url by which one others reach it"
        )
