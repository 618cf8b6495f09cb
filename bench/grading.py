"""Measures the grading pool: answers per second with one process and with all cores, and the cost of starting a program.

    python bench/grading.py                        4,096 answers, half programs with 20 tests, half mathematics
    python bench/grading.py --answers 256          a short run
    python bench/grading.py --processes 1 8 16     other numbers of processes than one and all cores
    python bench/grading.py --processes 16 20 24 --rounds 3 --starts 0 --no-plain     compares them in turns, in 90 s on 16 cores

Prints the overhead of a warmed start: the wall-clock time of an empty script in its sandbox, and of a program with 20 tests that do
nothing, per test. Then for each number of processes, with equally many answers for each process:

    ratio          answers per second, to processes (at most the cores) times those of one process that is kept on one core. Without
                   that, "one process" is more than one core: a program, its tests and what watches them run at the same time.
                   That one is measured again in each round
    plain          the same ratio of two loops without the pool, one that computes and one that forks: what the machine itself reaches.
                   Cores that are two threads of one processor core, or that other guests use, do not reach 1
    dispatcher     milliseconds of processor time of the pool's own process for one answer. Its threads share one interpreter
                   lock, so this must be far below the time for an answer divided by the number of processes
    machine        milliseconds of processor time of the whole machine for one answer; only meaningful if nothing else runs
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from shoal.tasks.grading.math_grader import grade_expression
from shoal.tasks.grading.pool import Answer, GradingPool
from shoal.tasks.grading.program_grader import grade_program
from shoal.tasks.grading.sandbox import SandboxLimits, best_level, passes, run_script
from shoal.tasks.task import Problem, Reward, Split

NUM_TESTS = 20
WORK = 4000
"""Steps of the loop in each program: about a millisecond for each test."""
PLAIN_S = 1.5
"""Seconds that each loop without the pool is measured."""
FEWEST = 512
"""Least number of answers of a measurement, or all there are."""


@dataclass(frozen=True)
class Mixture:
    """Grades a program if the problem has tests, otherwise an expression."""

    chat: bool = True

    def problem(self, split: Split, seed: int) -> Problem:
        raise NotImplementedError

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        grade = grade_program if problem.check.startswith("{") else grade_expression
        return grade(problem, text)


@dataclass(frozen=True)
class Speed:
    """What grading some answers took."""

    per_s: float
    dispatcher_ms: float
    """Processor time of this process for one answer."""
    machine_ms: float
    """Processor time of the whole machine for one answer."""


def make_answers(count: int) -> list[Answer]:
    """Returns answers, half of them programs; one in four is wrong."""
    rng = random.Random(1)
    answers = []
    for number in range(count):
        wrong, n = number % 4 == 3, rng.randrange(2, 1000)
        if number % 2 == 0:
            tests = [f"assert total({k}) == {k * (k - 1) // 2}" for k in range(WORK, WORK + NUM_TESTS)]
            body = f"    return sum(range(n)) + {int(wrong)}"
            text = f"```python\n# answer {n}\ndef total(n):\n    for i in range(n): pass\n{body}\n```"
            answers.append(Answer(Problem("", "", check=json.dumps({"tests": tests})), text, 1))
        else:
            gold = f"\\frac{{{n}}}{{{2 * n + 1}}}"
            answers.append(Answer(Problem("", "", check=gold), f"\\boxed{{{3 * n + wrong}/{6 * n + 3}}}", 1))
    return answers


def speed(answers: list[Answer], processes: int, *, cores: set[int] | None = None) -> Speed:
    """Grades the answers with a warmed pool, whose processes run on these cores only."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or allowed)  # threads and processes that start later inherit it
    try:
        pool = GradingPool(processes)
        pool.grade(Mixture(), answers[: 8 * processes])  # starts the processes of every thread
        started_s, own_s, all_s = time.perf_counter(), time.process_time(), machine_s()
        rewards = pool.grade(Mixture(), answers)
        took_s = time.perf_counter() - started_s
        own_s, all_s = time.process_time() - own_s, machine_s() - all_s
        pool.close()
    finally:
        os.sched_setaffinity(0, allowed)
    right = sum(reward.value for reward in rewards)
    wanted = sum(number % 4 != 3 for number in range(len(answers)))
    assert right == wanted, f"{right:.0f} answers are right, expected {wanted}"
    count = len(answers)
    return Speed(count / took_s, 1000 * own_s / count, 1000 * all_s / count)


def machine_s() -> float:
    """Returns the processor time of all processes since the machine started."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


# -- without the pool -------------------------------------------------------------------------------------


def compute() -> None:
    """Does the work of one test."""
    for _ in range(WORK):
        pass


def fork() -> None:
    """Starts a process that ends at once, as every sandbox does several times."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def plain_per_s(act: Callable[[], None], processes: int) -> float:
    """Returns how often this many processes can do something in a second, all together."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(processes)
    counts = context.SimpleQueue()
    children = [context.Process(target=repeat, args=(act, start, counts)) for _ in range(processes)]
    for child in children:
        child.start()
    total: int = sum(counts.get() for _ in children)
    for child in children:
        child.join()
    return total / PLAIN_S


def repeat(act: Callable[[], None], start, counts) -> None:  # type: ignore[no-untyped-def]
    """Runs in each process: repeats `act` until the time is over."""
    start.wait(60.0)
    end_s, count = time.perf_counter() + PLAIN_S, 0
    while time.perf_counter() < end_s:
        act()
        count += 1
    counts.put(count)


# -- starts -----------------------------------------------------------------------------------------------


def start_cost_ms(count: int) -> tuple[float, float]:
    """Returns the median milliseconds of an empty script, and of each of 20 tests that do nothing."""
    limits = SandboxLimits()
    scripts, tests = [], []
    for _ in range(count):
        started_s = time.perf_counter()
        run_script("", b"", limits=limits)
        scripts.append(1000 * (time.perf_counter() - started_s))
        started_s = time.perf_counter()
        assert passes("def f(x): return x", ["assert f(1) == 1"] * NUM_TESTS, limits=limits)
        tests.append(1000 * (time.perf_counter() - started_s) / NUM_TESTS)
    return statistics.median(scripts), statistics.median(tests)


def measure_all(
    answers: list[Answer], processes: list[int], cores: list[int], acts: list[Callable[[], None]]
) -> None:
    """Prints the speed of one process on one core, then of each number of processes. `acts` is what is measured without the pool."""
    one = speed(answers[: max(FEWEST, len(answers) // max(processes))], 1, cores={cores[0]})
    plain = {act: plain_per_s(act, 1) for act in acts}
    print(
        f"one process on one core: {one.per_s:.1f} answers/s, dispatcher {one.dispatcher_ms:.2f} ms, "
        f"machine {one.machine_ms:.2f} ms an answer"
    )
    print("processes  answers  answers/s  ratio  dispatcher ms  machine ms  plain: computing, forking")
    for count in processes:
        some = answers[: max(FEWEST, len(answers) * count // max(processes))]
        found = speed(some, count)
        used = min(count, len(cores))
        reached = [f"{plain_per_s(act, used) / (used * alone):.2f}" for act, alone in plain.items()]
        print(
            f"{count:9}  {len(some):7}  {found.per_s:9.1f}  {found.per_s / (used * one.per_s):5.2f}  "
            f"{found.dispatcher_ms:13.2f}  {found.machine_ms:10.2f}  {', '.join(reached)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument(
        "--answers",
        type=int,
        default=4096,
        help="answers for the largest number of processes (default: 4096)",
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, len(cores)], help="default: 1 and all cores"
    )
    parser.add_argument(
        "--starts", type=int, default=50, help="number of starts that are measured (default: 50)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often all of it is measured, in turns (default: 1)"
    )
    parser.add_argument(
        "--no-plain", action="store_true", help="do not measure what the machine reaches without the pool"
    )
    options = parser.parse_args()
    print(f"level {best_level()}, {len(cores)} cores, load {os.getloadavg()[0]:.1f} before the start")
    if options.starts:
        script_ms, test_ms = start_cost_ms(options.starts)
        print(
            f"warmed start: {script_ms:.1f} ms a script, {test_ms:.2f} ms a test of a program with {NUM_TESTS} tests"
        )
    answers = make_answers(options.answers)
    acts = [] if options.no_plain else [compute, fork]
    for _ in range(options.rounds):
        measure_all(answers, options.processes, cores, acts)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
