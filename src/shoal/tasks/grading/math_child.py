"""The grading child: `python math_child.py MEMORY_BYTES CPU_S`. Started and asked by math_judge.py, one JSON line each.

    {"golds": [...]}               ->  {"parsed": [true, ...]}
    {"gold": ..., "answer": ...}   ->  {"outcome": "right" | "wrong" | "unparseable"}

Imports nothing of ours, so that it runs wherever the interpreter and math-verify do. math-verify's own timeouts are signals
that its callees can swallow; here the kernel counts processor time, for each question anew.
"""

import json
import resource
import sys
from typing import Any


def main(memory_bytes: int, cpu_s: int) -> None:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[Any]:
        found = parse(
            f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=None, raise_on_error=False
        )
        # It always gives the text back as well; a text alone is what it made nothing of.
        return list(found) if any(not isinstance(one, str) for one in found) else []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if "golds" in question:
            return {
                "parsed": [_safely(lambda gold=gold: bool(parsed(gold)), False) for gold in question["golds"]]
            }
        return {"outcome": _safely(lambda: _outcome(question), "unparseable")}

    def _outcome(question: dict[str, Any]) -> str:
        gold, given = parsed(question["gold"]), parsed(question["answer"])
        if not given:
            return "unparseable"
        return "right" if gold and verify(gold, given, timeout_seconds=None) else "wrong"

    answer({"gold": "\\frac{1}{2}", "answer": "0.5"})  # loads what is loaded late
    _limit(memory_bytes)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        _limit_cpu(cpu_s)
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


def _safely(act: Any, otherwise: Any) -> Any:
    """Parsers of a stranger's text may raise anything at all, and none of it is ours."""
    try:
        return act()
    except (Exception, RecursionError, MemoryError):  # noqa: BLE001
        return otherwise


def _limit(memory_bytes: int) -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        mapped = 0
    limits = (
        (resource.RLIMIT_AS, mapped + memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
    )
    for kind, value in limits:
        resource.setrlimit(kind, (value, value))


def _limit_cpu(cpu_s: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + cpu_s, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
