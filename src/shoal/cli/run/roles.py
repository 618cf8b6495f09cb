"""`shoal coordinator`, `trainer`, `relay`, `worker` and `validator`: the arguments of each role, and how they become its config.

Imported before every command, so the roles themselves are imported inside the functions that start them.
"""

import argparse
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.commands.diloco import add_peer_options, check_peer_join, peer_address
from shoal.cli.run.supervise import EXIT_EJECTED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from shoal.cli.ui.values import (
    Commands,
    above_zero,
    add_command,
    add_device,
    add_engine_choice,
    add_flag,
    add_host,
    add_limits,
    add_list,
    add_max_rows,
    add_port,
    add_set,
    add_stop_with_stdin,
    add_threads,
    add_value,
    add_weights,
    at_least_one,
    check_device,
    device_of_rank,
    seconds,
    share,
    url,
)

if TYPE_CHECKING:
    from shoal.net.s3_store import Credentials
    from shoal.rollout.engine.drafting import DraftSettings
    from shoal.swarm.validator.decode_replay import DecodeReplay
    from shoal.wire.run_spec import RunSpec


# -- arguments ----------------------------------------------------------------------------------------------


def add_roles(commands: Commands) -> None:
    """Adds coordinator, trainer, relay, worker and validator."""
    _add_coordinator(commands)
    _add_trainer(commands)
    _add_relay(commands)
    _add_worker(commands)
    _add_validator(commands)


def _add_coordinator(commands: Commands) -> None:
    words = "issue leases, take submissions, keep the ledger"
    parser = add_command(commands, "coordinator", words, coordinator)
    words = "one run file, or several: each run then has a folder with its name under --dir"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.toml", help=words)
    words = "postgresql://..., instead of the run file's; several coordinators may share it"
    parser.add_argument("--database", metavar="URL", help=words)
    words = "the noise file of one run, instead of the run file's"
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=words)
    add_set(parser)
    _add_role_options(parser, port=8700)


def _add_trainer(commands: Commands) -> None:
    parser = add_command(commands, "trainer", "train on accepted groups and publish new versions", trainer)
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    parser.add_argument(
        "--keys", type=Path, required=True, help="folder with run.key and trainer.key, from the coordinator"
    )
    parser.add_argument(
        "--url", type=url, help="the URL at which relays reach this origin (default: http://HOST:PORT)"
    )
    add_set(parser)
    add_peer_options(parser)
    _add_torch_options(parser)
    _add_client_options(parser)
    _add_role_options(parser, port=8701)


def _add_relay(commands: Commands) -> None:
    parser = add_command(commands, "relay", "mirror new versions and serve them", relay)
    words = "the relay's own key, with its delegation.json beside it, as `shoal identity relay` writes them"
    parser.add_argument("--key", type=Path, required=True, help=words)
    words = "origin or relay to mirror (default: the origin the coordinator names)"
    add_list(parser, "--upstream", "URL", words, url)
    parser.add_argument(
        "--url", type=url, help="the URL at which workers reach this relay (default: the delegated one)"
    )
    words = "disk space for versions; a relay that needs more keeps fewer versions (default: no limit)"
    parser.add_argument("--max-gb", type=above_zero, help=words)
    words = "most that is sent to one address (default: no limit)"
    parser.add_argument("--mb-per-s", type=above_zero, help=words)
    add_flag(parser, "--private", "serve only members of the run, who present a ticket")
    add_value(parser, "--max-connections", at_least_one, 2048)
    add_value(parser, "--max-connections-per-address", at_least_one, 512)
    _add_client_options(parser)
    _add_role_options(parser, port=8702)


def _add_worker(commands: Commands) -> None:
    parser = add_command(commands, "worker", "generate rollouts for a run", worker)
    add_max_rows(parser)
    add_engine_choice(parser)
    add_weights(parser)
    _add_torch_options(parser)
    add_limits(parser)
    add_flag(parser, "--no-prefetch", "work on one lease at a time and fetch nothing ahead")
    words = "cheat in a named way, to see it caught; only against a coordinator on this machine"
    parser.add_argument("--lie", metavar="KIND", help=words)
    _add_client_options(parser)
    _add_role_options(parser, port=None)


def _add_validator(commands: Commands) -> None:
    parser = add_command(commands, "validator", "check submissions and give verdicts", validator)
    parser.add_argument("--key", type=Path, required=True, help="validator.key, from the coordinator")
    words = "grade programs even where they can read this user's files (also: SHOAL_ALLOW_LIMITS_SANDBOX=1)"
    add_flag(parser, "--allow-limits-sandbox", words)
    words = "versions in memory (default: as many as fit, at most 3)"
    parser.add_argument("--max-loaded", type=at_least_one, help=words)
    words = "tokens that are computed at once (default: what fits into half of the free memory)"
    parser.add_argument("--batch-tokens", type=at_least_one, help=words)
    words = "seconds to try for a version before work on it is void (default: 120, more for a large model)"
    parser.add_argument("--fetch-s", type=seconds, help=words)
    words = "share of submissions of this kind of machine that is decoded again and compared bit for bit"
    add_value(parser, "--replay", share, 0.0, words, metavar="SHARE")
    _add_torch_options(parser)
    _add_client_options(parser)
    _add_role_options(parser, port=None)


def _add_role_options(parser: argparse.ArgumentParser, *, port: int | None) -> None:
    parser.add_argument("--dir", type=Path, required=True, help="this role's folder")
    add_stop_with_stdin(parser)
    if port is not None:
        add_host(parser)
        add_port(parser, port)


def _add_torch_options(parser: argparse.ArgumentParser) -> None:
    add_threads(parser)
    add_device(parser)


def _add_client_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", type=url, required=True, metavar="URL", help="the coordinator's URL")
    add_value(parser, "--deadline-s", seconds, 900.0, "seconds to wait for another role before giving up")


# -- roles --------------------------------------------------------------------------------------------------


def coordinator(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.changes import recorded_settings
    from shoal.cli.run.runfile import check_calibrated, load_run_file
    from shoal.swarm.coordinator.http.server import Hosting, run_pool

    files = [
        load_run_file(path, calibration=options.calibration, overrides=options.set) for path in options.files
    ]
    for path, file in zip(options.files, files, strict=True):
        check_calibrated(path, file)
    if (options.database or options.calibration or options.set) and len(files) > 1:
        raise ValueError(
            "--database, --calibration and --set are for one run; with several, each run file names its own"
        )
    credentials = _credentials()
    runs = [
        Hosting(
            config=file.coordinator.model_copy(update={"database": options.database})
            if options.database
            else file.coordinator,
            spec=file.spec(),
            dir=options.dir / file.run.name if len(files) > 1 else options.dir,
            credentials=credentials,
            settings=recorded_settings(file),
        )
        for file in files
    ]
    run_pool(runs, options.host, options.port, stop)
    return _exit_code(stop)


def _credentials() -> "Credentials | None":
    """Returns the object store's credentials from the environment variables that S3 tools use."""
    from shoal.net.s3_store import Credentials

    access, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        return None
    token = os.environ.get("AWS_SESSION_TOKEN", "")
    return Credentials(access_key=access, secret_key=secret, session_token=token)


def trainer(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.calibration import calibrate_version
    from shoal.cli.run.runfile import load_run_file
    from shoal.trainer.io.publisher import OriginAddress
    from shoal.trainer.loop import TrainerSite, run_trainer
    from shoal.wire.keys import Key

    device = device_of_rank(options.device)
    check_device(device)
    if options.url is None and options.host in ("0.0.0.0", "::"):
        raise ValueError(
            f"--host {options.host} listens on every address of this machine; give --url, the one that others should use"
        )
    file = load_run_file(options.file, overrides=options.set)
    check_peer_join(options.peer_join, file.trainer.diloco)
    measure_noise = None
    if file.lacks_calibration:  # a calibration file of its own may cover machines that are not here
        measure_noise = partial(
            calibrate_version,
            options.file.resolve(),
            device=device,
            overrides=options.set,
            deadline_s=options.deadline_s,
            stop=stop,
        )
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
        peer=replace(peer_address(options, "peer_"), admit=tuple(options.peer_admit)),
        measure_noise=measure_noise,
        rank=int(os.environ.get("RANK", "0")),  # torchrun sets RANK and WORLD_SIZE
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
    )
    run_trainer(file.trainer, site, stop=stop)
    return _exit_code(stop)


def relay(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.shardcast import RelayConfig, run_relay
    from shoal.telemetry import Log
    from shoal.wire.delegation import read_relay_delegation
    from shoal.wire.keys import Key

    key = Key.load(options.key)
    config = RelayConfig(
        delegation=read_relay_delegation(options.key),
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
    return _exit_code(stop)


def worker(options: argparse.Namespace, stop: threading.Event) -> int:
    limit_thread_spinning()
    from shoal.files import is_out_of_memory
    from shoal.rollout.worker.limits import ResourceLimits, limit_cores, limit_memory

    num_cores = limit_cores(options.cores)
    from shoal.cli.run.confined_worker import LIMITS
    from shoal.rollout.worker.session import WorkerExit
    from shoal.rollout.worker.worker import WorkerConfig, run_worker

    check_device(options.device)
    limit_memory(options.memory_gb, options.device)
    draft = check_engine_options(options)
    behaviour = None
    if options.lie:
        from shoal.rollout.adversary.lies import make_behaviour

        behaviour = make_behaviour(options.lie, options.coordinator)
    config = WorkerConfig(
        coordinator=options.coordinator,
        dir=options.dir,
        engine=options.engine,
        device=options.device,
        tensor_parallel=options.tensor_parallel,
        weights=options.weights,
        draft=draft,
        max_rows=options.max_rows,
        num_threads=options.threads or (num_cores if options.cores else 0),
        deadline_s=options.deadline_s,
        prefetch=not options.no_prefetch,
        limits=ResourceLimits(**{name: getattr(options, name) for name in LIMITS}),
    )
    codes = {
        WorkerExit.FINISHED: EXIT_OK,
        WorkerExit.LEFT: EXIT_OK,
        WorkerExit.STOPPED: EXIT_INTERRUPTED,
        WorkerExit.EJECTED: EXIT_EJECTED,
    }
    try:
        return codes.get(run_worker(config, stop=stop, behaviour=behaviour), EXIT_FAILED)
    except (MemoryError, RuntimeError, OSError) as error:
        if options.memory_gb is None or not is_out_of_memory(error):
            raise
        raise ValueError(
            f"the worker needs more memory than --memory-gb {options.memory_gb:g} allows ({str(error)[:80] or 'MemoryError'}); "
            f"raise it, or lower --max-rows {options.max_rows}"
        ) from None


def validator(options: argparse.Namespace, stop: threading.Event) -> int:
    limit_thread_spinning()
    from shoal.swarm.validator.claim_loop import ValidatorConfig, run_validator
    from shoal.tasks.grading.sandbox import ALLOW_LIMITS

    check_device(options.device)
    if options.allow_limits_sandbox:
        os.environ[ALLOW_LIMITS] = "1"
    config = ValidatorConfig(
        coordinator=options.coordinator,
        key=options.key,
        dir=options.dir,
        device=options.device,
        num_threads=options.threads,
        max_loaded=options.max_loaded,
        batch_tokens=options.batch_tokens,
        fetch_s=options.fetch_s,
        deadline_s=options.deadline_s,
    )

    def make_replay(spec: "RunSpec") -> "DecodeReplay":
        from shoal.cli.run.replay_engine import WorkerReplay
        from shoal.swarm.validator.decode_replay import DecodeReplay

        return DecodeReplay(WorkerReplay(spec, device=options.device), options.replay)

    run_validator(config, stop=stop, make_replay=make_replay if options.replay else None)
    return _exit_code(stop)


# -- what roles share ---------------------------------------------------------------------------------------


def check_engine_options(options: argparse.Namespace) -> "DraftSettings | None":
    """Returns the settings of --draft. Raises ValueError if this machine cannot run the worker's engine."""
    from shoal.rollout.engine.drafting import DraftSettings
    from shoal.rollout.engine.selection import check_engine

    draft = DraftSettings.parse(options.draft, options.draft_rows, options.device)
    check_engine(
        options.engine,
        device=options.device,
        tensor_parallel=options.tensor_parallel,
        weights=options.weights,
        draft=draft,
    )
    return draft


def limit_thread_spinning() -> None:
    """Makes OpenMP threads sleep soon while they wait for each other. Call it before torch is imported.

    Threads that spin take the cores from other programs, and a lease then takes many times as long. To sleep at once
    (OMP_WAIT_POLICY=PASSIVE) would cost 40 % on an idle machine. A setting by the owner is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _exit_code(stop: threading.Event) -> int:
    """Returns EXIT_INTERRUPTED for a role that was told to stop: it has not finished, and a supervisor may restart it."""
    return EXIT_INTERRUPTED if stop.is_set() else EXIT_OK
