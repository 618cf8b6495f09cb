"""Arguments of most commands, whose modules are slow to import.

Every command imports this file first, so it imports only options and their types; `Imported` names a command's function.
"""

import argparse
import threading
from pathlib import Path

from shoal.cli.ui.values import (
    ADMIN_ACTIONS,
    DTYPES,
    Action,
    Commands,
    Imported,
    above_zero,
    add_command,
    add_compute_options,
    add_device,
    add_engine_choice,
    add_flag,
    add_host,
    add_json,
    add_limits,
    add_list,
    add_max_rows,
    add_run_argument,
    add_sampling_options,
    add_set,
    add_stop_with_stdin,
    add_subcommands,
    add_task_options,
    add_task_settings,
    add_threads,
    add_value,
    add_weights,
    at_least_one,
    option,
    port_number,
    seconds,
    share,
    url,
    url_or_folder,
)

# -- shoal demo and run -----------------------------------------------------------------------------------


def add_demo(commands: Commands) -> None:
    words = "a whole swarm on this machine: a small model learns, a lying worker is ejected"
    parser = add_command(commands, "demo", words, Imported("commands.demo", "demo"))
    add_value(parser, "--dir", Path, Path("out/demo"))
    parser.add_argument(
        "--port", type=port_number, help="the coordinator's port (default: 8700, or a free one)"
    )
    add_device(parser)
    add_flag(parser, "--resume", "continue a demo that was stopped")
    add_flag(parser, "--yes", "install torch without asking, if it is missing")


def add_run(commands: Commands) -> None:
    parser = add_command(commands, "run", "start every role of a run file on this machine", _run)
    parser.add_argument("file", type=Path, metavar="FILE.toml")
    add_set(parser, "; several values (1,2,3) are a sweep: one run after another")
    parser.add_argument("--dir", type=Path, help="folder for the run's files (default: out/NAME)")
    add_device(parser, "where trainer, workers and validators compute")
    add_host(parser, "address to listen on; 0.0.0.0 lets other machines join")
    parser.add_argument(
        "--port",
        type=port_number,
        help="the coordinator's port (default: 8700, or another free one if that is taken)",
    )
    words = "try the file's task, model and sinks, and print the numbers that follow from it"
    add_flag(parser, "--dry-run", words)
    add_flag(parser, "--json", "with --dry-run: print the numbers as JSON")
    words = "with [trainer.diloco]: address of another site or of a rendezvous"
    add_list(parser, "--peer-join", "ADDRESS", words)
    how = parser.add_mutually_exclusive_group()
    words = "continue a run that was stopped, killed or finished; last_version, [trainer] and [coordinator] may have changed"
    add_flag(how, "--resume", words)
    add_flag(how, "--fresh", "delete an earlier run in that folder first")


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
    words = "what this node earned, and why a submission was refused"
    status = _add_node_command(commands, "status", words, Imported("commands.join", "status"))
    words = "this node's id, owner and run"
    whoami = _add_node_command(commands, "whoami", words, Imported("commands.join", "whoami"))
    words = "finish the current lease and wait; `shoal pause --off` continues"
    pause = _add_node_command(commands, "pause", words, Imported("commands.join", "pause"))
    when = pause.add_mutually_exclusive_group()
    add_flag(when, "--off", "continue")
    add_flag(when, "--now", "give the current lease back instead of finishing it")
    words = "finish the current lease and leave the run"
    _add_node_command(commands, "leave", words, Imported("commands.join", "leave"))
    words = "leave the run and delete everything that joining has written"
    remove = _add_node_command(commands, "remove", words, Imported("commands.join", "remove"))
    add_flag(remove, "--yes", "delete without being asked")
    add_flag(remove, "--keep-key", "keep node.key, which owns the credit")
    words = "run a validator's checks on the last file this node made, or on FILE"
    check = _add_node_command(commands, "check-local", words, Imported("commands.join", "check_local"))
    check.add_argument("file", type=Path, nargs="?", help="default: the last file this node made")
    check.add_argument("--lease", type=Path, help="the file's lease (default: lease.json beside the file)")
    _add_identity(commands)
    words = "check this installation, and whether it can work for a run"
    doctor = _add_node_command(commands, "doctor", words, Imported("commands.doctor", "doctor"))
    doctor.add_argument("url", type=url, nargs="?", help="the coordinator's URL (default: only this machine)")
    for parser in (status, whoami, check, doctor):
        add_json(parser)


def _add_node_command(commands: Commands, name: str, words: str, action: Action) -> argparse.ArgumentParser:
    """Adds a command that works in a node's folder."""
    parser = add_command(commands, name, words, action)
    add_value(parser, "--dir", Path, Path("shoal-node"), "the node's folder")
    return parser


def _add_join(commands: Commands) -> None:
    words = "check this machine, ask for consent, and work for a run"
    join = _add_node_command(commands, "join", words, Imported("commands.join", "join"))
    join.add_argument("url", type=url, help="the coordinator's URL")
    join.add_argument(
        "--run", metavar="NAME", help="which of the coordinator's runs (default: the first suitable one)"
    )
    add_flag(join, "--yes", "agree to the summary without being asked")
    join.add_argument("--invite", default="", metavar="CODE", help="invitation from the run's operator")
    add_max_rows(join)
    add_engine_choice(join)
    add_weights(join)
    add_device(join)
    add_threads(join)
    add_limits(join)
    add_flag(join, "--plain", "print log lines instead of the view, also at a terminal")
    add_value(join, "--deadline-s", seconds, 900.0, "seconds to wait for the coordinator before giving up")
    words = "another port that the worker may connect to, such as that of the run's object store"
    add_list(join, "--allow-port", "PORT", words, port_number)


def _add_identity(commands: Commands) -> None:
    actions = add_subcommands(commands, "identity", "back up, restore and delegate keys")
    words = "write this node's key to FILE"
    backup = _add_node_command(actions, "backup", words, Imported("commands.identity", "backup"))
    words = "restore a key from a backup into the folder"
    restore = _add_node_command(actions, "restore", words, Imported("commands.identity", "restore"))
    for parser in (backup, restore):
        parser.add_argument("file", type=Path)
    words = "sign, as an owner, for a node for up to 30 days"
    delegate = add_command(actions, "delegate", words, Imported("commands.identity", "delegate"))
    delegate.add_argument("node", help="the node's id, as `shoal whoami` prints it")
    delegate.add_argument(
        "--owner", type=Path, required=True, help="the owner's key file; it is created if it does not exist"
    )
    add_value(delegate, "--days", above_zero, 30.0)
    add_value(delegate, "--out", Path, Path("delegation.json"))
    words = "make, as the operator, the key of the relay at a URL"
    relay = add_command(actions, "relay", words, Imported("commands.identity", "delegate_relay"))
    relay.add_argument("url", type=url, help="the URL at which workers reach the relay")
    relay.add_argument("--owner", type=Path, required=True, help="relay.key of the coordinator's keys folder")
    add_value(relay, "--days", above_zero, 365.0)
    words = "folder for relay.key and delegation.json, to copy to its host"
    relay.add_argument("--out", type=Path, required=True, help=words)


# -- commands that measure and check ------------------------------------------------------------------------


def add_analysis_commands(commands: Commands) -> None:
    """Adds ledger, audit, explain, tasks, data, toploc, arena and admin."""
    actions = add_subcommands(commands, "ledger", "check a run's ledger")
    words = "recompute every hash, the signed head and every balance"
    verify = add_command(actions, "verify", words, Imported("commands.audit", "verify"))
    add_run_argument(verify)
    add_json(verify)
    _add_audit(commands)
    words = "what a refusal code means"
    explain = add_command(commands, "explain", words, Imported("commands.doctor", "explain"))
    explain.add_argument("code", nargs="?", help="such as reject.early_stop; without one, all are listed")
    add_json(explain)
    _add_tasks(commands)
    _add_data(commands)
    _add_toploc(commands)
    _add_arena(commands)
    _add_admin(commands)


def _add_audit(commands: Commands) -> None:
    words = "repeat a sample of a run's verdicts, accepted and refused"
    parser = add_command(commands, "audit", words, Imported("commands.audit", "audit"))
    add_run_argument(parser)
    parser.add_argument("--key", type=Path, help="with a URL: validator.key, from the coordinator")
    words = "with a URL: folder for the versions that are fetched (of a folder: temporary)"
    parser.add_argument("--dir", type=Path, help=words)
    add_value(parser, "--sample", at_least_one, 16, "number of verdicts, chosen at random")
    parser.add_argument("--lease", metavar="ID", help="repeat only the verdict on this lease")
    parser.add_argument("--seed", type=int, help="the same seed chooses the same sample")
    add_json(parser)


def _add_tasks(commands: Commands) -> None:
    words = "list the installed tasks, or show problems of one"
    parser = add_command(commands, "tasks", words, Imported("commands.tasks", "list_tasks"))
    actions = parser.add_subparsers(metavar="ACTION")
    words = "print three problems, each with a right and a wrong answer"
    show = add_command(actions, "show", words, Imported("commands.tasks", "show_task"))
    show.add_argument("task", metavar="NAME", help="a task that `shoal tasks` lists, or FILE.py:CLASS")
    add_task_settings(show)
    add_value(show, "--seed", int, 0, "chooses the problems")


def _add_data(commands: Commands) -> None:
    actions = add_subcommands(commands, "data", "prepare problems for a run")
    words = "keep the problems that a model solves sometimes"
    filter_ = add_command(actions, "filter", words, Imported("commands.data", "filter_problems"))
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
    words = "number of problems to try (default: all, if the task reads a file)"
    filter_.add_argument("--problems", type=at_least_one, help=words)
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
    words = "list unusable rows of a data set; leave out rows without a model"
    check = add_command(actions, "check", words, Imported("commands.data_check", "check_data"))
    add_task_options(check, required=True)
    words = "leave out training rows that ask a question of this data set, such as math=math500_test.jsonl; may be repeated"
    add_list(check, "--against", "TASK=FILE", words, option)
    add_flag(check, "--gold", "grade the rows' own answers; leave out rows whose answer is not right")
    check.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write the rows that remain")
    add_json(check)


def _add_toploc(commands: Commands) -> None:
    actions = add_subcommands(commands, "toploc", "measure the noise of honest proofs")
    words = "generate honest rows with proofs on this machine"
    prove = add_command(actions, "prove", words, Imported("commands.toploc", "prove"))
    add_value(prove, "--rows", at_least_one, 512)
    add_value(prove, "--max-new-tokens", at_least_one, 96)
    add_value(prove, "--task", str, "add", "the task whose prompts are answered")
    add_max_rows(prove)
    add_engine_choice(prove)
    words = "check honest rows here and write the noise file"
    calibrate = add_command(actions, "calibrate", words, Imported("commands.toploc", "calibrate"))
    words = "files that `prove` wrote; each name should say on which machine"
    calibrate.add_argument("files", type=Path, nargs="+", metavar="ROWS", help=words)
    words = "measure the noise of a run file's own model, task and terms on this machine"
    whole = add_command(actions, "calibrate-run", words, Imported("commands.toploc", "calibrate_run"))
    whole.add_argument("file", type=Path, metavar="FILE.toml")
    add_set(whole)
    model = whole.add_mutually_exclusive_group()
    model.add_argument("--model", help="measure this model instead, for example a later version of the run")
    words = "keep the run's model in this folder, which a trainer then takes as its own; an existing one is measured"
    model.add_argument("--write-model", type=Path, metavar="FOLDER", help=words)
    whole.add_argument("--out", type=Path, required=True, metavar="NOISE")
    add_device(whole)
    add_threads(whole)
    add_stop_with_stdin(whole)
    for action in (prove, calibrate):
        action.add_argument("--model", required=True, help="a folder, or a built-in model")
        add_value(action, "--temperature", above_zero, 1.0, "the run's sampling temperature")
        add_compute_options(action)
        action.add_argument("--out", type=Path, required=True, metavar="FILE")


def _add_arena(commands: Commands) -> None:
    words = "compare schemes that verify inference on honest rows and on lies"
    parser = add_command(commands, "arena", words, Imported("commands.arena", "arena"))
    add_value(parser, "--model", str, "tiny", "a folder, or a built-in model")
    add_value(parser, "--task", str, "sort", "the task whose prompts are answered")
    add_value(parser, "--dtype", str, "bfloat16", choices=DTYPES)
    add_value(parser, "--honest", at_least_one, 1200, "honest submissions")
    add_value(parser, "--submissions", at_least_one, 32, "submissions of each lie")
    add_value(parser, "--max-new-tokens", at_least_one, 24)
    add_value(parser, "--temperature", above_zero, 1.0)
    add_max_rows(parser)
    parser.add_argument("--lies", nargs="+", metavar="LIE", help="only these lies (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts and draws")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write every score to this file")
    add_device(parser)
    add_threads(parser)


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
    docs = add_command(commands, "docs", "print a page of the documentation", Imported("docs_pages", "docs"))
    docs.add_argument("page", nargs="?", metavar="PAGE", help="such as run-file or guides/operator")
    words = "print the script that completes commands and options"
    completion = add_command(commands, "completion", words, Imported("commands.demo", "completion"))
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh", "fish"))
    completion.set_defaults(whole_parser=whole_parser)
