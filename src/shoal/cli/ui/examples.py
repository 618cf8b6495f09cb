"""One example for the help of every command. A test checks that each command has one and that the example is valid."""

import argparse
from collections.abc import Iterator

EXAMPLES = {
    "demo": "shoal demo",
    "docs": "shoal docs run-file",
    "completion": "shoal completion bash > ~/.local/share/bash-completion/completions/shoal",
    "init": "shoal init own.toml --model tiny --data questions.jsonl",
    "run": "shoal run own.toml --set trainer.learning_rate=1e-5",
    "coordinator": "shoal coordinator run.toml --dir coordinator --host 0.0.0.0",
    "trainer": "shoal trainer run.toml --coordinator http://HOST:8700 --keys keys --dir trainer --device cuda",
    "relay": "shoal relay --coordinator http://HOST:8700 --key relay.key --dir relay --host 0.0.0.0",
    "worker": "shoal worker --coordinator http://HOST:8700 --dir worker --device cuda",
    "validator": "shoal validator --coordinator http://HOST:8700 --key validator.key --dir validator",
    "join": "shoal join http://HOST:8700 --cores 4 --memory-gb 8",
    "status": "shoal status --json",
    "whoami": "shoal whoami",
    "pause": "shoal pause",
    "leave": "shoal leave",
    "remove": "shoal remove",
    "check-local": "shoal check-local",
    "identity": "shoal identity backup node.backup",
    "identity backup": "shoal identity backup node.backup",
    "identity restore": "shoal identity restore node.backup --dir another-node",
    "identity delegate": "shoal identity delegate NODE --owner owner.key --days 30",
    "identity relay": "shoal identity relay http://HOST:8702 --owner keys/relay.key --out relay-keys",
    "doctor": "shoal doctor http://HOST:8700",
    "export": "shoal export out/demo --version best --out demo-model",
    "push": "shoal push out/demo ORG/NAME --private",
    "chat": "shoal chat out/demo",
    "ledger": "shoal ledger verify http://HOST:8700",
    "ledger verify": "shoal ledger verify http://HOST:8700",
    "audit": "shoal audit http://HOST:8700 --key validator.key --dir audit --sample 32",
    "explain": "shoal explain reject.wrong_computation",
    "eval": "shoal eval tiny --task count --k 8",
    "serve": "shoal serve smollm2-135m --port 8000",
    "verify": "shoal verify response.json --model smollm2-135m",
    "tasks": "shoal tasks show sort",
    "tasks show": "shoal tasks show sort --option length=4",
    "data": "shoal data check --task gsm8k --option path=train.jsonl",
    "data filter": "shoal data filter --task count --model tiny --out kept.jsonl",
    "data check": "shoal data check --task gsm8k --option path=train.jsonl",
    "toploc": "shoal toploc prove --model tiny --out rows.parquet",
    "toploc prove": "shoal toploc prove --model tiny --out rows.parquet",
    "toploc calibrate": "shoal toploc calibrate rows.parquet --model tiny --out noise.json",
    "toploc calibrate-run": "shoal toploc calibrate-run run.toml --out noise.json",
    "arena": "shoal arena --model tiny --out scores.json",
    "admin": 'shoal admin invite --coordinator http://HOST:8700 --key admin.key --reason "for the lab"',
    "diloco": "shoal diloco train site.toml --dir site",
    "diloco train": "shoal diloco train site.toml --dir site",
    "diloco swarm": "shoal diloco swarm --run NAME --dir rendezvous",
    "diloco id": "shoal diloco id --dir site",
    "rollouts": "shoal rollouts out/demo --version 12 --reward 1",
    "compare": "shoal compare out/demo out/demo-2 --out compare.html",
    "report": "shoal report out/demo --out demo.html",
    "top": "shoal top http://HOST:8700",
}


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the name and the parser of every command below `parser`, such as `ledger` and `ledger verify`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name, command
                for rest, inner in commands_of(command):
                    yield f"{name} {rest}", inner


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Puts the example of each command below the options in its help."""
    for name, command in commands_of(parser):
        if name in EXAMPLES:
            command.epilog = f"example:\n  {EXAMPLES[name]}"
            command.formatter_class = argparse.RawDescriptionHelpFormatter
