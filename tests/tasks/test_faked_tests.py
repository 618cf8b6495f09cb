"""Wrong programs that try to make their tests pass: each one fails, on the test that it was made for."""

import json
from pathlib import Path

import pytest

from shoal.tasks import Outcome, make_task
from shoal.tasks.grading.entry_points import names_from_program
from shoal.tasks.grading.sandbox import SandboxLimits, passes
from shoal.wire.run_spec import TaskSpec

LIMITS = SandboxLimits(cpu_s=2, wall_s=8.0, memory_bytes=200 << 20)
SET = "assert set(f((3, 4), (4, 5))) == set((4,))"
ABS = "assert abs(f(3.5) - 0.5) < 1e-6"
PLAIN = "assert f(1) == 7"
RAISES = "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError"

REDEFINED = {
    "set": ("def set(x): return 0\ndef f(a, b): return ()", SET),
    "abs": ("def abs(x): return 0\ndef f(x): return x", ABS),
    "sorted": ("def sorted(x): return 0\ndef f(x): return [9]", "assert sorted(f([2, 1])) == sorted([1, 2])"),
    "len": ("def len(x): return 0\ndef f(x): return [9]", "assert len(f(3)) == len([1, 2, 3])"),
    "round": ("def round(*x): return 0\ndef f(x): return 0", "assert round(f(2), 3) == round(1.41421, 3)"),
    "all": ("def all(x): return True\ndef f(x): return 0", "assert all([f(1) == 7, f(2) == 8])"),
    "any": ("def any(x): return False\ndef f(x): return 0", "assert not any(f(x) != 7 for x in (1, 2))"),
    "isinstance": ("def isinstance(*a): return True\ndef f(x): return ''", "assert isinstance(f(1), int)"),
    "AssertionError": ("class AssertionError: pass\ndef f(x): return 0", PLAIN),
    "range": (
        "def range(*a): return ()\ndef f(x): return 0",
        "for i in range(1, 3):\n    assert f(i) == 7",
    ),
    "sum as a constant": ("sum = 7\ndef f(x): return 0", "assert sum([f(1)]) == 7"),
    "len with a star": (
        "globals().update(len=lambda x: 0)\ndef f(x): return []",
        "assert len(f(1)) == len([1])",
    ),
    "a module": (
        "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
        "assert math.isclose(f(1), 7)",
    ),
    "a module, imported by another name": (
        "import cmath as math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0",
        "import math\nassert math.isclose(f(1), 7)",
    ),
    "sys.modules": (
        "import sys\nsys.modules['math'] = sys\nsys.isclose = lambda *a: True\ndef f(x): return 0",
        "import math\nassert math.isclose(f(1), 7)",
    ),
    "a helper of the tests": (
        "def same(a, b): return True\ndef f(x): return 0",
        "def same(a, b): return a == b\nassert same(f(1), 7)",
    ),
    "a variable of the tests": ("wanted = 0\ndef f(x): return 0", "wanted = 7\nassert f(1) == wanted"),
    "__builtins__": ("__builtins__ = {'abs': lambda x: 0}\ndef f(x): return x", ABS),
    "builtins.abs": ("import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return x", ABS),
    "operator.eq": ("import operator\noperator.eq = lambda a, b: True\ndef f(x): return 0", PLAIN),
}

STEERED = {
    "StopIteration in map": ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
    "StopIteration in a list": ("def f(x): raise StopIteration", "for y in map(f, [1]):\n    assert y == 7"),
    "StopIteration in next": ("def f(x): raise StopIteration", "assert next(map(f, [1]), 7) == 7"),
    "a subclass of StopIteration": (
        "class E(StopIteration): pass\ndef f(x): raise E()",
        "assert all(map(f, [1, 2]))",
    ),
    "StopIteration by iter": ("def f(): raise StopIteration", "assert list(iter(f, 0)) == []"),
    "StopAsyncIteration": ("def f(x): raise StopAsyncIteration", "assert all(map(f, [1]))"),
    "GeneratorExit": (
        "def f(x): raise GeneratorExit",
        "def g():\n    yield 1\n    assert f(1) == 7\nlist(g())",
    ),
    "KeyboardInterrupt": ("def f(x): raise KeyboardInterrupt", PLAIN),
    "SystemExit": ("def f(x): raise SystemExit(0)", PLAIN),
    "sys.exit": ("import sys\ndef f(x): sys.exit(0)", PLAIN),
    "an exception group": (
        "def f(x): raise ExceptionGroup('x', [StopIteration()])",
        "assert all(map(f, [1]))",
    ),
    "another exception than asked for": ("def f(x): raise KeyError", RAISES),
    "os._exit where an exception is expected": (
        "import os\ndef f(x): os._exit(0)",
        "try:\n    f(-1)\nexcept Exception:\n    pass",
    ),
    "a name that raises": (
        "class M(type):\n    __module__ = 'builtins'\nclass StopIteration(Exception):\n    __module__ = 'builtins'\n"
        "def f(x): raise StopIteration",
        "assert all(map(f, [1]))",
    ),
}

OBJECTS = {
    "int": "class C(int):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = int.__hash__\nx = C(0)",
    "str": "class C(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\nx = C('')",
    "float": "class C(float):\n    __eq__ = lambda s, o: True\n    __sub__ = __rsub__ = lambda s, o: 0\nx = C(0)",
    "list": "class C(list):\n    __eq__ = lambda s, o: True\n    __iter__ = lambda s: iter([7])\nx = C()",
    "tuple": "class C(tuple):\n    __eq__ = lambda s, o: True\nx = C()",
    "dict": "class C(dict):\n    __eq__ = lambda s, o: True\nx = C()",
    "set": "class C(set):\n    __eq__ = lambda s, o: True\nx = C()",
    "object": "class C:\n    __eq__ = lambda s, o: True\n    __class__ = int\nx = C()",
    "Decimal": "import decimal\nclass C(decimal.Decimal):\n    __eq__ = lambda s, o: True\n    __str__ = lambda s: '0'\nx = C(0)",
    "Fraction": "import fractions\nclass C(fractions.Fraction):\n    __eq__ = lambda s, o: True\nx = C(0)",
    "a generator": "x = (i for i in [7])",
    "a class": "class x:\n    __eq__ = lambda s, o: True",
    "unittest.mock.ANY": "from unittest.mock import ANY as x",
}

OTHERS = {
    "mutates the argument of the tests": (
        "def f(x):\n    x[:] = [7]\n    return x and None",
        "a = [1]\nassert f(a) == 7 or a == [7]",
    ),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)", PLAIN),
    "a deep value": ("x = 0\nfor _ in range(100000): x = [x]\ndef f(y): return x", PLAIN),
    "a value that contains itself": ("x = []\nx.append(x)\ndef f(y): return x", PLAIN),
    "a thread that outlives the call": (
        "import threading, os, time\ndef g():\n    time.sleep(0.3)\n    os._exit(0)\n"
        "def f(x):\n    threading.Thread(target=g).start()\n    return 0",
        PLAIN,
    ),
    "a thread that floods the pipe": (
        "import threading, os\ndef g():\n    while True:\n        for fd in range(3, 32):\n            try: os.write(fd, b'passed')\n"
        "            except OSError: pass\nthreading.Thread(target=g, daemon=True).start()\ndef f(x): return 0",
        PLAIN,
    ),
    "reads the stack": (
        "import sys\ndef f(x):\n    frame = sys._getframe()\n    seen = ''\n    while frame:\n"
        "        seen += repr(frame.f_locals) + repr(frame.f_globals)\n        frame = frame.f_back\n"
        "    return 7 if ' '.join(['assert', 'f(1)']) in seen else 0",
        PLAIN,
    ),
    "reads its memory": (
        "import gc\ndef f(x): return 7 if any(' '.join(['assert', 'f(1)']) in s for s in gc.get_objects() if isinstance(s, str)) else 0",
        PLAIN,
    ),
    "reads its memory by addresses": (
        "def f(x):\n    text = ''\n    try:\n        for line in open('/proc/self/maps'):\n            a, b = line.split()[0].split('-')\n"
        "            with open('/proc/self/mem', 'rb') as m:\n                m.seek(int(a, 16))\n"
        "                try: text += m.read(int(b, 16) - int(a, 16)).decode('latin1')\n                except OSError: pass\n"
        "    except OSError: return 0\n    return 7 if ' '.join(['assert', 'f(1)']) in text else 0",
        PLAIN,
    ),
    "reads its file descriptors": (
        "import os\ndef f(x):\n    for fd in range(64):\n        try:\n            if b'assert' in os.pread(fd, 10000, 0): return 7\n"
        "        except OSError: pass\n    return 0",
        PLAIN,
    ),
}


@pytest.mark.parametrize(("program", "test"), REDEFINED.values(), ids=REDEFINED.keys())
def test_a_program_cannot_redefine_what_the_tests_use(program: str, test: str) -> None:
    assert not passes(program, [test], limits=LIMITS)


@pytest.mark.parametrize(("program", "test"), STEERED.values(), ids=STEERED.keys())
def test_an_exception_of_the_program_does_not_steer_the_tests(program: str, test: str) -> None:
    assert not passes(program, [test], limits=LIMITS)


@pytest.mark.parametrize("program", OBJECTS.values(), ids=OBJECTS.keys())
@pytest.mark.parametrize(
    "test", ["assert f(1) == 7", "assert 7 == f(1)", "assert not f(1) != 7", "assert f(1) in (7, 8)"]
)
def test_objects_that_equal_everything_are_compared_as_plain_values(program: str, test: str) -> None:
    assert not passes(f"{program}\ndef f(y): return x", [test], limits=LIMITS)


@pytest.mark.parametrize(("program", "test"), OTHERS.values(), ids=OTHERS.keys())
def test_a_program_learns_and_changes_nothing_of_the_tests(program: str, test: str) -> None:
    assert not passes(program, [test], limits=LIMITS)


FORGED = {
    "modules in an old frame": {"functions": ["f"], "modules": {"math": "cmath"}, "constants": {"set": 0}},
    "a list": [1],
    "an unknown kind": {"value": {"exec": "1"}},
    "two kinds": {"value": {"int": "7", "float": "7"}},
    "not a number": {"value": {"int": "seven"}},
    "a fraction of a hundred million digits": {"value": {"Fraction": "1e99999999"}},
    "an exception beside the list": {"error": ["StopIteration", "x"]},
    "an exception by a path": {"error": ["__import__", "os"]},
    "an error without a message": {"error": []},
    "a function where a value is expected": {"function": True},
}


@pytest.mark.parametrize("frame", FORGED.values(), ids=FORGED.keys())
@pytest.mark.parametrize("test", [PLAIN, "assert all(map(f, [1, 2]))", RAISES])
def test_forged_frames_do_not_pass(frame: object, test: str) -> None:
    """Answers every request, from the first on, with the frame; the last frame answers the ping."""
    program = (
        f"import json, os\ndata = json.dumps({frame!r}).encode()\ndata = len(data).to_bytes(4, 'big') + data\n"
        "for fd in range(3, 32):\n    try: [os.write(fd, data) for _ in range(9)]\n    except OSError: pass\ndef f(x): return 0"
    )
    assert not passes(program, [test], limits=LIMITS)


def test_right_programs_pass_the_same_tests() -> None:
    right = {
        SET: "def f(a, b): return [x for x in a if x in b]",
        ABS: "def f(x): return x % 1",
        PLAIN: "def f(x): return 7",
        RAISES: "class Negative(ValueError): pass\ndef f(x): raise Negative(x)",
        "assert math.isclose(f(1), 7)": "import math\ndef f(x): return 7.0",
        "assert Point(1).x == 1 and LIMIT == 3": "",
    }
    for test, program in right.items():
        assert passes(program, [test], limits=LIMITS) == bool(program), test


def test_only_free_names_of_the_tests_are_taken_from_the_program() -> None:
    assert names_from_program((SET, ABS)) == (["f"], [])
    helper = "def check(candidate):\n    assert candidate(1) == helper(2)"
    assert names_from_program((helper, "check(f)")) == (["f", "helper"], [])
    assert names_from_program(("x = 1\nassert g(x, y) == [z for z in w]",)) == (["g", "w", "y"], [])
    assert names_from_program(("import math", "assert math.pi > 3 and re.match('a', f())")) == (["f"], ["re"])
    assert names_from_program(("not a test", "assert f()")) == (["f"], [])


def test_the_data_set_may_name_an_entry_point_like_a_builtin(tmp_path: Path) -> None:
    """MBPP's row 126 asks for a function `sum`, which is then the program's; `genesys` may ask for `list`."""
    row = {
        "task_id": 126,
        "prompt": "sum",
        "code": "def sum(a, b):\n  return 6",
        "test_imports": [],
        "test_list": ["assert sum(10, 15) == 6"],
    }
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(row))
    cases = [{"type": "function_call", "fn_name": "list", "input": [3], "output": [3]}]
    info = {"language": "python", "test_cases": cases}
    genesys = {"prompt": "p", "task_type": "verifiable_code", "verification_info": json.dumps(info)}
    (tmp_path / "genesys.jsonl").write_text(json.dumps(genesys))
    for name, right, wrong in (
        ("mbpp", "def sum(a, b): return 6", "def sum(a, b): return 5\ndef abs(x): return 6"),
        ("genesys", "def list(x): return (x,)", "def list(x): return []"),
    ):
        path = str(tmp_path / f"{name}.jsonl")
        task = make_task(TaskSpec(name=name, options={"path": path, "eval_path": path}))
        problem = task.problem("eval", 0)
        assert task.reward(problem, f"```python\n{right}\n```", 1).outcome is Outcome.RIGHT
        assert task.reward(problem, f"```python\n{wrong}\n```", 1).outcome is Outcome.WRONG


def test_helpers_of_humaneval_are_the_data_sets_own(tmp_path: Path) -> None:
    """HumanEval/32 checks the zero of a polynomial with a helper that the program may redefine for itself only."""
    row = {
        "task_id": "T/32",
        "prompt": 'def poly(xs, x):\n    return sum(c * x ** i for i, c in enumerate(xs))\n\n\ndef zero(xs):\n    """ A zero. """\n',
        "entry_point": "zero",
        "canonical_solution": "    return -xs[0] / xs[1]\n",
        "test": "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4\n",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    task = make_task(TaskSpec(name="humaneval", options={"path": str(tmp_path / "rows.jsonl")}))
    problem = task.problem("eval", 0)
    assert task.reward(problem, problem.answer, 1).outcome is Outcome.RIGHT
    fake = "```python\ndef poly(xs, x): return 0\ndef zero(xs): return 5\n```"
    assert task.reward(problem, fake, 1).outcome is Outcome.WRONG
    annotated = "```python\nfrom __future__ import annotations\ndef zero(xs: list) -> float: return -xs[0] / xs[1]\n```"
    assert task.reward(problem, annotated, 1).outcome is Outcome.RIGHT, "poly comes after the import"
