"""Arguments of most commands, whose modules are slow to import.

Every command imports this file first, so it imports only options and their types; `Imported` names a command's function.
"""

import argparse
import threading
from pathlib import Path

from shoal.cli.ui.values import (
    ADMIN_ACTIONS,
    Action,
    Commands,
    Imported,
    above_zero,
    add_compute_options,
    add_device,
    add_engine_choice,
    add_json,
    add_limits,
    add_run_argument,
    add_sampling_options,
    add_set,
    add_task_options,
    add_task_settings,
    add_threads,
    add_weights,
    at_least_one,
    option,
    port_number,
    seconds,
    share,
    url,
    url_or_folder,
)

NODE_FOLDER = Path("shoal-node")


# -- shoal demo and run -----------------------------------------------------------------------------------


def add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo", help="a whole swarm on this machine: a small model learns, a lying worker is ejected"
    )
    parser.add_argument("--dir", type=Path, default=Path("out/demo"), help="(default: out/demo)")
    parser.add_argument(
        "--port", type=port_number, help="the coordinator's port (default: 8700, or a free one)"
    )
    add_device(parser)
    parser.add_argument("--resume", action="store_true", help="continue a demo that was stopped")
    parser.add_argument("--yes", action="store_true", help="install torch without asking, if it is missing")
    parser.set_defaults(action=Imported("commands.demo", "demo"))


def add_run(commands: Commands) -> None:
    parser = commands.add_parser("run", help="start every role of a run file on this machine")
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    add_set(parser, "; several values (1,2,3) are a sweep: one run after another")
    parser.add_argument("--dir", type=Path, help="folder for the run's files (default: out/NAME)")
    add_device(parser, "where trainer, workers and validators compute")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 lets other machines join (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        help="the coordinator's port (default: 8700, or another free one if that is taken)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="try the file's task, model and sinks, and print the numbers that follow from it",
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print the numbers as JSON")
    parser.add_argument(
        "--peer-join",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="with [trainer.diloco]: address of another site or of a rendezvous",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--resume",
        action="store_true",
        help="continue a run that was stopped, killed or finished; last_version, [trainer] and [coordinator] may have changed",
    )
    how.add_argument("--fresh", action="store_true", help="delete an earlier run in that folder first")
    parser.set_defaults(action=_run)


def _run(options: argparse.Namespace, stop: threading.Event) -> int:
    from shoal.cli.run.overrides import combinations

    if len(combinations(options.set)) > 1:
        from shoal.cli.run.sweep import sweep

        return sweep(options, stop)
    from shoal.cli.run.local import run

    return run(options, stop)


# -- commands of a contributor ------------------------------------------------------------------------------


def add_contributor_commands(commands: Commands) -> None:
    """Adds join, status, whoami, pause, leave, remove, check-local, identity and doctor."""
    _add_join(commands)
    for name, words, action in (
        (
            "status",
            "what this node earned, and why a submission was refused",
            Imported("commands.join", "status"),
        ),
        ("whoami", "this node's id, owner and run", Imported("commands.join", "whoami")),
    ):
        parser = commands.add_parser(name, help=words)
        add_json(parser)
        _add_node_folder(parser, action)
    pause = commands.add_parser(
        "pause", help="finish the current lease and wait; `shoal pause --off` continues"
    )
    when = pause.add_mutually_exclusive_group()
    when.add_argument("--off", action="store_true", help="continue")
    when.add_argument(
        "--now", action="store_true", help="give the current lease back instead of finishing it"
    )
    _add_node_folder(pause, Imported("commands.join", "pause"))
    leave = commands.add_parser("leave", help="finish the current lease and leave the run")
    _add_node_folder(leave, Imported("commands.join", "leave"))
    remove = commands.add_parser(
        "remove", help="leave the run and delete everything that joining has written"
    )
    remove.add_argument("--yes", action="store_true", help="delete without being asked")
    remove.add_argument("--keep-key", action="store_true", help="keep node.key, which owns the credit")
    _add_node_folder(remove, Imported("commands.join", "remove"))
    check = commands.add_parser(
        "check-local", help="run a validator's checks on the last file this node made, or on FILE"
    )
    check.add_argument("file", type=Path, nargs="?", help="default: the last file this node made")
    check.add_argument("--lease", type=Path, help="the file's lease (default: lease.json beside the file)")
    add_json(check)
    _add_node_folder(check, Imported("commands.join", "check_local"))
    _add_identity(commands)
    doctor = commands.add_parser("doctor", help="check this installation, and whether it can work for a run")
    doctor.add_argument("url", type=url, nargs="?", help="the coordinator's URL (default: only this machine)")
    add_json(doctor)
    _add_node_folder(doctor, Imported("commands.doctor", "doctor"))


def _add_join(commands: Commands) -> None:
    join = commands.add_parser("join", help="check this machine, ask for consent, and work for a run")
    join.add_argument("url", type=url, help="the coordinator's URL")
    join.add_argument(
        "--run", metavar="NAME", help="which of the coordinator's runs (default: the first suitable one)"
    )
    join.add_argument("--yes", action="store_true", help="agree to the summary without being asked")
    join.add_argument("--invite", default="", metavar="CODE", help="invitation from the run's operator")
    join.add_argument("--max-rows", type=at_least_one, default=64, help="rows decoded at once (default: 64)")
    add_engine_choice(join)
    add_weights(join)
    add_device(join)
    add_threads(join)
    add_limits(join)
    join.add_argument(
        "--plain", action="store_true", help="print log lines instead of the view, also at a terminal"
    )
    join.add_argument(
        "--deadline-s",
        type=seconds,
        default=900.0,
        help="seconds to wait for the coordinator before giving up (default: 900)",
    )
    join.add_argument(
        "--allow-port",
        type=port_number,
        action="append",
        default=[],
        metavar="PORT",
        help="another port that the worker may connect to, such as that of the run's object store",
    )
    _add_node_folder(join, Imported("commands.join", "join"))


def _add_identity(commands: Commands) -> None:
    parser = commands.add_parser("identity", help="back up, restore and delegate keys")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, words, action in (
        ("backup", "write this node's key to FILE", Imported("commands.identity", "backup")),
        ("restore", "restore a key from a backup into the folder", Imported("commands.identity", "restore")),
    ):
        one = actions.add_parser(name, help=words)
        one.add_argument("file", type=Path)
        _add_node_folder(one, action)
    delegate = actions.add_parser("delegate", help="sign, as an owner, for a node for up to 30 days")
    delegate.add_argument("node", help="the node's id, as `shoal whoami` prints it")
    delegate.add_argument(
        "--owner", type=Path, required=True, help="the owner's key file; it is created if it does not exist"
    )
    delegate.add_argument("--days", type=above_zero, default=30.0, help="(default: 30)")
    delegate.add_argument(
        "--out", type=Path, default=Path("delegation.json"), help="(default: delegation.json)"
    )
    delegate.set_defaults(action=Imported("commands.identity", "delegate"))
    relay = actions.add_parser("relay", help="make, as the operator, the key of the relay at a URL")
    relay.add_argument("url", type=url, help="the URL at which workers reach the relay")
    relay.add_argument("--owner", type=Path, required=True, help="relay.key of the coordinator's keys folder")
    relay.add_argument("--days", type=above_zero, default=365.0, help="(default: 365)")
    relay.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for relay.key and delegation.json, to copy to its host",
    )
    relay.set_defaults(action=Imported("commands.identity", "delegate_relay"))


def _add_node_folder(parser: argparse.ArgumentParser, action: Action) -> None:
    parser.add_argument(
        "--dir", type=Path, default=NODE_FOLDER, help=f"the node's folder (default: {NODE_FOLDER})"
    )
    parser.set_defaults(action=action)


# -- commands that measure and check ------------------------------------------------------------------------


def add_analysis_commands(commands: Commands) -> None:
    """Adds ledger, audit, explain, tasks, data, toploc, arena and admin."""
    _add_ledger(commands)
    _add_audit(commands)
    explain = commands.add_parser("explain", help="what a refusal code means")
    explain.add_argument("code", nargs="?", help="such as reject.early_stop; without one, all are listed")
    add_json(explain)
    explain.set_defaults(action=Imported("commands.doctor", "explain"))
    _add_tasks(commands)
    _add_data(commands)
    _add_toploc(commands)
    _add_arena(commands)
    _add_admin(commands)


def _add_ledger(commands: Commands) -> None:
    parser = commands.add_parser("ledger", help="check a run's ledger")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    verify = actions.add_parser("verify", help="recompute every hash, the signed head and every balance")
    add_run_argument(verify)
    add_json(verify)
    verify.set_defaults(action=Imported("commands.audit", "verify"))


def _add_audit(commands: Commands) -> None:
    parser = commands.add_parser("audit", help="repeat a sample of a run's verdicts, accepted and refused")
    add_run_argument(parser)
    parser.add_argument("--key", type=Path, help="with a URL: validator.key, from the coordinator")
    parser.add_argument(
        "--dir",
        type=Path,
        help="with a URL: folder for the versions that are fetched (of a folder: temporary)",
    )
    parser.add_argument(
        "--sample", type=at_least_one, default=16, help="number of verdicts, chosen at random (default: 16)"
    )
    parser.add_argument("--lease", metavar="ID", help="repeat only the verdict on this lease")
    parser.add_argument("--seed", type=int, default=None, help="the same seed chooses the same sample")
    add_json(parser)
    parser.set_defaults(action=Imported("commands.audit", "audit"))


def _add_tasks(commands: Commands) -> None:
    parser = commands.add_parser("tasks", help="list the installed tasks, or show problems of one")
    parser.set_defaults(action=Imported("commands.tasks", "list_tasks"))
    actions = parser.add_subparsers(metavar="ACTION")
    show = actions.add_parser("show", help="print three problems, each with a right and a wrong answer")
    show.add_argument("task", metavar="NAME", help="a task that `shoal tasks` lists, or FILE.py:CLASS")
    add_task_settings(show)
    show.add_argument("--seed", type=int, default=0, help="chooses the problems (default: 0)")
    show.set_defaults(action=Imported("commands.tasks", "show_task"))


def _add_data(commands: Commands) -> None:
    parser = commands.add_parser("data", help="prepare problems for a run")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    filter_ = actions.add_parser("filter", help="keep the problems that a model solves sometimes")
    add_task_options(filter_, required=True)
    filter_.add_argument("--model", help="a folder, or a built-in model; not with --coordinator")
    filter_.add_argument("--k", type=at_least_one, help="answers to each problem (default: 8)")
    filter_.add_argument(
        "--band",
        type=share,
        nargs=2,
        default=(0.125, 0.5),
        metavar=("LOW", "HIGH"),
        help="keep problems whose share of right answers is from LOW to HIGH (default: 0.125 0.5)",
    )
    filter_.add_argument(
        "--problems",
        type=at_least_one,
        help="number of problems to try (default: all, if the task reads a file)",
    )
    filter_.add_argument(
        "--out", type=Path, metavar="FILE.jsonl", help="the file with the problems that are kept"
    )
    filter_.add_argument(
        "--run-file",
        type=Path,
        metavar="FILE.toml",
        help="only write the run file of a swarm that answers the problems, for `shoal run` or `shoal coordinator`",
    )
    filter_.add_argument(
        "--coordinator",
        metavar="RUN",
        type=url_or_folder,
        help="take the answers from such a run, by its coordinator's URL or its folder; waits until all are there",
    )
    add_sampling_options(filter_)
    filter_.set_defaults(action=Imported("commands.data", "filter_problems"))
    check = actions.add_parser(
        "check", help="list unusable rows of a data set; leave out rows without a model"
    )
    add_task_options(check, required=True)
    check.add_argument(
        "--against",
        type=option,
        action="append",
        default=[],
        metavar="TASK=FILE",
        help="leave out training rows that ask a question of this data set, such as math=math500_test.jsonl; may be repeated",
    )
    check.add_argument(
        "--gold",
        action="store_true",
        help="grade the rows' own answers; leave out rows whose answer is not right",
    )
    check.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write the rows that remain")
    add_json(check)
    check.set_defaults(action=Imported("commands.data_check", "check_data"))


def _add_toploc(commands: Commands) -> None:
    parser = commands.add_parser("toploc", help="measure the noise of honest proofs")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    prove = actions.add_parser("prove", help="generate honest rows with proofs on this machine")
    prove.add_argument("--rows", type=at_least_one, default=512, help="(default: 512)")
    prove.add_argument("--max-new-tokens", type=at_least_one, default=96, help="(default: 96)")
    prove.add_argument("--task", default="add", help="the task whose prompts are answered (default: add)")
    prove.add_argument("--max-rows", type=at_least_one, default=64, help="rows decoded at once (default: 64)")
    add_engine_choice(prove)
    prove.set_defaults(action=Imported("commands.toploc", "prove"))
    calibrate = actions.add_parser("calibrate", help="check honest rows here and write the noise file")
    calibrate.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="ROWS",
        help="files that `prove` wrote; each name should say on which machine",
    )
    calibrate.set_defaults(action=Imported("commands.toploc", "calibrate"))
    whole = actions.add_parser(
        "calibrate-run", help="measure the noise of a run file's own model, task and terms on this machine"
    )
    whole.add_argument("file", type=Path, metavar="FILE.toml")
    add_set(whole)
    whole.add_argument("--model", help="measure this model instead, for example a later version of the run")
    whole.add_argument("--out", type=Path, required=True, metavar="NOISE")
    add_device(whole)
    add_threads(whole)
    whole.add_argument("--stop-with-stdin", action="store_true", help="stop when standard input ends")
    whole.set_defaults(action=Imported("commands.toploc", "calibrate_run"))
    for action in (prove, calibrate):
        action.add_argument("--model", required=True, help="a folder, or a built-in model")
        action.add_argument(
            "--temperature", type=above_zero, default=1.0, help="the run's sampling temperature (default: 1)"
        )
        add_compute_options(action)
        action.add_argument("--out", type=Path, required=True, metavar="FILE")


def _add_arena(commands: Commands) -> None:
    parser = commands.add_parser(
        "arena", help="compare schemes that verify inference on honest rows and on lies"
    )
    parser.add_argument("--model", default="tiny", help="a folder, or a built-in model (default: tiny)")
    parser.add_argument("--task", default="sort", help="the task whose prompts are answered (default: sort)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="(default: bfloat16)"
    )
    parser.add_argument(
        "--honest", type=at_least_one, default=1200, help="honest submissions (default: 1200)"
    )
    parser.add_argument(
        "--submissions", type=at_least_one, default=32, help="submissions of each lie (default: 32)"
    )
    parser.add_argument("--max-new-tokens", type=at_least_one, default=24, help="(default: 24)")
    parser.add_argument("--temperature", type=above_zero, default=1.0, help="(default: 1)")
    parser.add_argument(
        "--max-rows", type=at_least_one, default=64, help="rows decoded at once (default: 64)"
    )
    parser.add_argument("--lies", nargs="+", metavar="LIE", help="only these lies (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts and draws")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write every score to this file")
    add_device(parser)
    add_threads(parser)
    parser.set_defaults(action=Imported("commands.arena", "arena"))


def _add_admin(commands: Commands) -> None:
    parser = commands.add_parser(
        "admin",
        help="actions of the operator: ban, pause, invite, ...",
        epilog="\n".join(f"  {name:<11} {words}" for name, words in ADMIN_ACTIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("order", choices=tuple(ADMIN_ACTIONS), metavar="ACTION")
    parser.add_argument("subject", nargs="?", default="", help="a node, an owner's key or a lease")
    parser.add_argument("--reason", required=True, help="recorded in the ledger")
    parser.add_argument("--amount", type=int, default=0, help="for invite and stake")
    parser.add_argument("--coordinator", type=url, required=True, metavar="URL")
    parser.add_argument("--key", type=Path, required=True, help="admin.key, from the coordinator")
    parser.set_defaults(action=Imported("commands.admin", "admin"))


# -- help ---------------------------------------------------------------------------------------------------


def add_help_commands(commands: Commands, whole_parser: argparse.ArgumentParser) -> None:
    """Adds docs and completion. `whole_parser` has all commands."""
    docs = commands.add_parser("docs", help="print a page of the documentation")
    docs.add_argument("page", nargs="?", metavar="PAGE", help="such as run-file or guides/operator")
    docs.set_defaults(action=Imported("docs_pages", "docs"))
    completion = commands.add_parser(
        "completion", help="print the script that completes commands and options"
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh", "fish"))
    completion.set_defaults(action=Imported("commands.demo", "completion"), whole_parser=whole_parser)
