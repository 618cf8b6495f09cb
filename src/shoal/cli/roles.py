"""One role each: what the command line says becomes the role's own configuration."""

import argparse
import threading

from shoal.cli.runfile import load_run_file
from shoal.cli.supervise import EXIT_EJECTED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from shoal.telemetry import Log
from shoal.wire.keys import Key


def coordinator(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.swarm.coordinator.run import run_coordinator

    file = load_run_file(options.file)
    run_coordinator(file.coordinator, file.spec(), options.dir, options.host, options.port, stop)
    return EXIT_OK


def trainer(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.trainer.loop import TrainerSite, run_trainer
    from shoal.trainer.publisher import Address

    file = load_run_file(options.file)
    site = TrainerSite(
        folder=options.dir,
        model=file.run.model,
        coordinator_url=options.coordinator,
        key=Key.load(options.keys / "trainer.key"),
        run_key=Key.load(options.keys / "run.key"),
        address=Address(host=options.host, port=options.port, url=options.url),
        device=options.device,
        num_threads=options.threads,
        deadline_s=options.deadline_s,
    )
    run_trainer(file.trainer, site, stop=stop)
    return EXIT_OK


def relay(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.shardcast import RelayConfig, run_relay

    config = RelayConfig(
        folder=options.dir,
        coordinator=options.coordinator,
        upstreams=tuple(options.upstream),
        host=options.host,
        port=options.port,
        url=options.url,
        deadline_s=options.deadline_s,
    )
    run_relay(config, key=Key.load(options.key), log=Log("relay"), stop=stop)
    return EXIT_OK


def worker(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.rollout.session import Exit
    from shoal.rollout.worker import WorkerConfig, run_worker

    config = WorkerConfig(
        coordinator=options.coordinator,
        dir=options.dir,
        device=options.device,
        max_rows=options.max_rows,
        num_threads=options.threads,
        deadline_s=options.deadline_s,
        lie=options.lie,
    )
    codes = {Exit.FINISHED: EXIT_OK, Exit.STOPPED: EXIT_INTERRUPTED, Exit.EJECTED: EXIT_EJECTED}
    return codes.get(run_worker(config, stop=stop), EXIT_FAILED)


def validator(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.swarm.validator.loop import ValidatorConfig, run_validator

    config = ValidatorConfig(
        coordinator=options.coordinator,
        key=options.key,
        dir=options.dir,
        device=options.device,
        num_threads=options.threads,
        deadline_s=options.deadline_s,
    )
    run_validator(config, stop=stop)
    return EXIT_OK
