"""`shoal run` before it starts roles: its folder, its ports and the roles' commands."""

import contextlib
import dataclasses
import io
import socket
import threading
from pathlib import Path

import pytest
from rich.console import Console
from small_stats import HONEST, LIAR, node, stats

from shoal.cli.main import parse
from shoal.cli.run.addresses import (
    COORDINATOR_PORT,
    LOOPBACK,
    PORTS,
    RunAddresses,
    choose_addresses,
    free_ports,
    join_sentences,
)
from shoal.cli.run.local import (
    MARKER,
    LocalRun,
    check_folder,
    check_workers,
    commands_of_roles,
    live_guests,
    local_workers,
    prepare_folder,
    resume_command,
    run_local,
    workers_by_node,
)
from shoal.cli.run.runfile import LocalSection, load_run_file
from shoal.cli.run.summary import LocalWorker
from shoal.cli.run.supervise import Child, RunFailed, Supervisor
from shoal.wire.keys import Key

QUIET = Console(file=io.StringIO())
HERE = RunAddresses(host=LOOPBACK, outside=LOOPBACK, ports=(20001, 20002, 20003, 20004))
DEMO = Path(__file__).parent.parent.parent / "runs" / "demo.toml"


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    source = tmp_path / "demo.toml"
    source.write_bytes(DEMO.read_bytes())
    local = LocalSection(relays=2, workers=2, lies=("wrong-weights",))
    return LocalRun(
        file=load_run_file(source).model_copy(update={"local": local}),
        source=source,
        folder=tmp_path / "run",
        resume=False,
        fresh=False,
        device="cpu",
    )


def test_other_users_do_not_see_the_folder(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.cli.run.local.lock_folder", fail)
    with pytest.raises(KeyboardInterrupt):
        run_local(run, threading.Event(), QUIET)
    assert run.folder.stat().st_mode & 0o777 == 0o700


def begin(run: LocalRun) -> None:
    run.folder.mkdir()
    prepare_folder(run, QUIET)
    (run.folder / "trainer").mkdir()
    (run.folder / "trainer" / "precious").write_text("weights")


def resumed(run: LocalRun) -> LocalRun:
    return dataclasses.replace(run, resume=True)


def fresh(run: LocalRun) -> LocalRun:
    return dataclasses.replace(run, fresh=True)


def test_a_new_folder_remembers_its_run_file(run: LocalRun) -> None:
    check_folder(run)
    begin(run)
    assert (run.folder / MARKER).read_bytes() == run.source.read_bytes()


def test_an_earlier_run_is_not_overwritten(run: LocalRun) -> None:
    begin(run)
    with pytest.raises(
        ValueError, match=r"holds an earlier run; continue it with --resume, or .* with --fresh"
    ):
        check_folder(run)
    assert (run.folder / "trainer" / "precious").exists()


def test_resuming(run: LocalRun) -> None:
    with pytest.raises(ValueError, match=r"nothing to resume: .* holds no run; start it without --resume"):
        check_folder(resumed(run))
    begin(run)
    check_folder(resumed(run))
    prepare_folder(resumed(run), QUIET)
    assert (run.folder / "trainer" / "precious").exists()
    run.source.write_text(run.source.read_text() + "\n# a thought\n")
    check_folder(resumed(run))


def test_resuming_with_other_settings(run: LocalRun) -> None:
    begin(run)
    text = run.source.read_text()
    run.source.write_text(text.replace("last_version = 100", "last_version = 120"))
    out = io.StringIO()
    check_folder(resumed(run))
    prepare_folder(resumed(run), Console(file=out, width=300))
    assert "changed since the run began: run.last_version 100 -> 120; the ledger records it" in out.getvalue()
    assert (run.folder / MARKER).read_bytes() == run.source.read_bytes()
    run.source.write_text(text.replace('name = "sort"', 'name = "count"'))
    with pytest.raises(
        ValueError, match=r"task\.name is 'count', but the run began with 'sort' .* another run from this"
    ):
        check_folder(resumed(run))


def test_fresh_deletes_only_the_run(run: LocalRun, tmp_path: Path) -> None:
    begin(run)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    (run.folder / "link").symlink_to(outside)
    check_folder(fresh(run))
    out = io.StringIO()
    prepare_folder(fresh(run), Console(file=out, width=200))
    assert f"deleting the run in {run.folder}" in out.getvalue()
    assert [path.name for path in run.folder.iterdir()] == [MARKER]
    assert (outside / "kept").exists()


def test_files_of_others_are_not_deleted(run: LocalRun) -> None:
    run.folder.mkdir()
    check_folder(run)  # an empty folder is fine
    (run.folder / "thesis.tex").write_text("years")
    for asked in (run, fresh(run)):
        with pytest.raises(
            ValueError, match="holds files that are not a run's, so they are not deleted; choose another"
        ):
            check_folder(asked)


def test_resume_command_has_all_options(run: LocalRun) -> None:
    default = dataclasses.replace(run, folder=Path("out/demo"), source=Path("runs/demo.toml"))
    assert resume_command(default) == "shoal run runs/demo.toml --resume"
    there = dataclasses.replace(default, folder=Path("my runs/x"), device="cuda")
    assert resume_command(there) == "shoal run runs/demo.toml --dir 'my runs/x' --device cuda --resume"


# -- ports --------------------------------------------------------------------------------------------------


def test_ports_differ_and_are_in_the_chosen_range() -> None:
    with contextlib.ExitStack() as held:
        ports = free_ports(20, held=held)
    assert len(set(ports)) == 20
    assert all(port in PORTS for port in ports)


def choose(folder: Path, port: int | None = None) -> list[int]:
    with contextlib.ExitStack() as held:
        return list(choose_addresses(folder, LOOPBACK, port, relays=2, held=held).ports)


def test_two_runs_that_start_together_have_different_ports(tmp_path: Path) -> None:
    """Neither has a coordinator yet, so nothing listens on the first one's ports."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as held:
        first = choose_addresses(tmp_path / "first", LOOPBACK, None, relays=2, held=held).ports
        second = choose_addresses(tmp_path / "second", LOOPBACK, None, relays=2, held=held).ports
        assert not set(first) & set(second)


def test_the_coordinators_port_is_fixed_unless_it_is_taken(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another program here may have it already
            taken.bind((LOOPBACK, COORDINATOR_PORT))
            taken.listen()
        port = choose(tmp_path)[0]
        assert port in PORTS
        with pytest.raises(ValueError, match=r"--port 8700 is in use by another program"):
            choose(tmp_path, COORDINATOR_PORT)
    assert choose(tmp_path)[0] == port, "a resumed run keeps its port"


def test_a_port_in_use_or_a_foreign_address_is_refused_before_a_run_is_deleted(run: LocalRun) -> None:
    run.folder.mkdir()
    for name in (MARKER, "model.safetensors"):
        (run.folder / name).write_text("hours of work")
    fresh = dataclasses.replace(run, fresh=True)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} is in use by another program"):
            run_local(dataclasses.replace(fresh, port=port), threading.Event(), QUIET)
    with pytest.raises(ValueError, match=r"--host 192\.0\.2\.1: .*; give an address of this machine"):
        run_local(dataclasses.replace(fresh, host="192.0.2.1"), threading.Event(), QUIET)
    assert (run.folder / "model.safetensors").read_text() == "hours of work"


def test_others_join_by_one_line() -> None:
    assert join_sentences(HERE, "open") == [
        "only this machine can join; --host 0.0.0.0 lets others in your network join"
    ]
    there = RunAddresses(host="0.0.0.0", outside="10.0.0.5", ports=(8700, 20002, 20003))
    assert there.url == "http://127.0.0.1:8700"
    assert join_sentences(there, "open") == ["others join with: shoal join http://10.0.0.5:8700"]
    assert "--invite CODE" in join_sentences(there, "invite")[0]
    assert there.options(20003)[-1] == "http://10.0.0.5:20003"
    assert "--url" not in there.options(8700)


def test_a_resumed_run_keeps_its_ports(tmp_path: Path) -> None:
    ports = choose(tmp_path)
    assert choose(tmp_path) == ports
    with contextlib.closing(socket.socket()) as taken:
        # What is left of an earlier connection must not keep the test from it.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((LOOPBACK, ports[2]))
        taken.listen()
        others = choose(tmp_path)
    assert [others[0], others[1], others[3]] == [ports[0], ports[1], ports[3]]
    assert others[2] not in ports


# -- roles --------------------------------------------------------------------------------------------------


def test_role_commands_parse(run: LocalRun) -> None:
    commands = dict(commands_of_roles(run, HERE))
    assert list(commands) == [
        "coordinator",
        "trainer",
        "relay-1",
        "relay-2",
        "validator-1",
        "worker-1",
        "worker-2",
        "worker-3",
    ]
    for name, arguments in commands.items():
        options = parse([*arguments, "--stop-with-stdin"])
        assert options.dir == run.folder / name
    assert parse(commands["relay-2"]).port == 20004
    assert [parse(commands[f"worker-{number}"]).lie for number in (1, 2, 3)] == [None, None, "wrong-weights"]


def test_relays_are_private_where_the_file_says_so(run: LocalRun) -> None:
    shardcast = run.file.shardcast.model_copy(update={"private": True})
    private = dataclasses.replace(run, file=run.file.model_copy(update={"shardcast": shardcast}))
    for one, expected in ((run, False), (private, True)):
        commands = dict(commands_of_roles(one, HERE))
        assert parse(commands["relay-1"]).private is expected


def test_workers_are_known_by_the_keys_they_made(run: LocalRun) -> None:
    assert local_workers(run.file) == [("worker-1", None), ("worker-2", None), ("worker-3", "wrong-weights")]
    assert workers_by_node(run) == {}
    keys = [Key.load_or_create(run.folder / f"worker-{number}" / "node.key").public for number in (1, 3)]
    assert workers_by_node(run) == {
        keys[0]: LocalWorker("worker-1", None),
        keys[1]: LocalWorker("worker-3", "wrong-weights"),
    }


def test_a_run_without_workers_ends(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    for name, ended in (("trainer", None), ("worker-1", 4), ("worker-2", None)):
        log = tmp_path / f"{name}.log"
        log.write_text(f"shoal: {name} was ejected\n")
        supervisor.children[name] = Child(name, [], log, None, 0.0, ended=ended)  # type: ignore[arg-type]
    check_workers(supervisor)
    supervisor.children["worker-2"].ended = 4
    with pytest.raises(
        RunFailed,
        match=r"every worker has left .*: worker-1: worker-1 was ejected; worker-2: worker-2 was ejected",
    ):
        check_workers(supervisor)


def test_guests_are_workers_that_the_run_did_not_start() -> None:
    seen = stats(nodes=(node(HONEST), node(LIAR), node("ab" * 32, liveness="offline")))
    assert live_guests(seen, {HONEST: LocalWorker("worker-1", None)}) == 1
    assert (
        live_guests(seen, {HONEST: LocalWorker("worker-1", None), LIAR: LocalWorker("worker-2", None)}) == 0
    )
