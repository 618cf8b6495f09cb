"""Renders a model's chat template in a child process under limits.

A chat template is a program that came with the model, possibly from an operator whom the owner of this machine does not trust.
Jinja's sandbox keeps it from Python's internals, but not from looping for ever or from making a string of a gigabyte. So it
runs in a child that has little memory and processor time, and that can be killed.

The environment is the one for which templates are written (transformers): the same options, filters and functions. Two things
differ: `strftime_now` gives UTC, so that all machines render the same prompt, and `lipsum` does not exist.
"""

import functools
import json
import signal
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

from shoal.child_process import ChildDied, ChildError, ChildLimits, ChildProcess, ChildTimeout, serve

MAX_TEMPLATE_CHARS = 1 << 18
"""Longest template that is compiled. The longest of known models has about 20,000 characters."""
MAX_PROMPT_CHARS = 1 << 20
"""Longest text that a template may produce."""
MAX_RENDER_S = 0.5
"""Processor time of one rendering. A usual template takes less than a millisecond."""
_LIMITS = ChildLimits(memory_bytes=256 << 20, cpu_s=1)
"""The kernel ends a child that the timer cannot stop: one that spends its time in a single operation."""
_WAIT_S = 30.0
"""Wall-clock time for one rendering; much longer than its processor time, since the machine may be busy."""

_child = ChildProcess(
    "shoal.model.chat_template:serve_templates", limits=_LIMITS, max_reply_bytes=8 * MAX_PROMPT_CHARS
)
"""One child for all tokenizers of this process. It starts with the first template."""


def render_chat(
    template: str,
    turns: list[dict[str, str]],
    special_tokens: dict[str, str],
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text of a conversation followed by the start of the model's turn. Raises ValueError if it cannot.

    `arguments` are further variables of the template, such as `enable_thinking`.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ValueError(
            f"the chat template has {len(template)} characters, at most {MAX_TEMPLATE_CHARS} are allowed"
        )
    variables = dict(arguments or {}) | special_tokens
    request = json.dumps({"template": template, "turns": turns, "special_tokens": variables})
    try:
        reply = json.loads(_child.exchange(request.encode(), timeout_s=_WAIT_S, attempts=1))
    except (ChildDied, ChildTimeout) as error:
        raise ValueError(f"the chat template used up its time or memory: {error}") from None
    except ChildError as error:
        raise ValueError(f"the chat template cannot be rendered: {error}") from None
    if "error" in reply:
        raise ValueError(f"the chat template cannot be rendered: {reply['error']}")
    return str(reply["text"])


THOUGHT_START, THOUGHT_END = "<think>", "</think>"
_PROBE = "What is 1 + 1"


@functools.lru_cache(maxsize=64)
def template_thinks(template: str, special_tokens: str, arguments: str = "{}") -> bool:
    """Returns whether the template makes the model think before its answer. `special_tokens` and `arguments` are JSON.

    The start of the model's turn decides: a thought that is opened there and not closed (QwQ) means yes, one that is closed at once
    (Qwen3 with enable_thinking = false) means no. If there is none, the model opens the thought itself where the template knows how
    to leave earlier thoughts out of a conversation (Qwen3).
    """
    if THOUGHT_START not in template and THOUGHT_END not in template:
        return False
    probe = [{"role": "user", "content": _PROBE}]
    prompt = render_chat(template, probe, json.loads(special_tokens), json.loads(arguments))
    start = prompt.rpartition(_PROBE)[2]
    opened, closed = start.rfind(THOUGHT_START), start.rfind(THOUGHT_END)
    return opened > closed if opened != closed else THOUGHT_END in template


# -- in the child -------------------------------------------------------------------------------------------


class _OutOfTime(BaseException):
    """Ends a rendering. Not an Exception, so that no handler inside Jinja catches it."""


def serve_templates(limits: ChildLimits) -> None:
    """Answers rendering requests until the parent ends."""
    compile_template = _make_compiler()
    compiled: dict[str, Any] = {}

    def answer(request: bytes) -> bytes:
        asked = json.loads(request)
        template = asked["template"]
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_RENDER_S)
        try:
            if template not in compiled:
                compiled.clear()
                compiled[template] = compile_template(template)
            text = _render(compiled[template], asked["turns"], asked["special_tokens"])
        except _OutOfTime:
            return _error(f"it took more than {MAX_RENDER_S:g} s of processor time")
        except MemoryError:
            return _error(f"it needs more than {limits.memory_bytes >> 20} MiB of memory")
        except RecursionError:
            return _error("it calls itself too deeply")
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            return _error(f"{type(error).__name__}: {error}"[:500])
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return json.dumps({"text": text}).encode()

    signal.signal(signal.SIGVTALRM, _raise_out_of_time)
    serve(answer, limits)


def _raise_out_of_time(*_: object) -> NoReturn:
    raise _OutOfTime


def _error(words: str) -> bytes:
    return json.dumps({"error": words}).encode()


def _render(template: Any, turns: list[dict[str, str]], special_tokens: dict[str, str]) -> str:
    pieces, num_chars = [], 0
    context = {"messages": turns, "tools": None, "documents": None, "add_generation_prompt": True}
    for piece in template.generate(**(special_tokens | context)):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise ValueError(f"its text is longer than {MAX_PROMPT_CHARS} characters")
    return "".join(pieces)


def _make_compiler() -> Callable[[str], Any]:
    """Imports Jinja, which only the child needs, and returns a function that compiles a template."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now(UTC).strftime(format),
        # Not the type itself, which has attributes that templates should not reach.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _namespace_type(),
    }
    # The first use loads modules, for which the child has neither time nor open files later.
    environment.from_string("{% for turn in messages %}{{ turn.content | trim }}{% endfor %}").render(
        messages=[]
    )
    return environment.from_string


def _generation_tag() -> type[Any]:
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        """Accepts {% generation %} blocks, which mark the model's own turns for training, and renders what is in them."""

        tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

        def render_body(self, caller: Callable[[], str]) -> str:
            return caller()

    return GenerationTag


def _namespace_type() -> type[Any]:
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    def check_public(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the private name {name!r}")

    class TemplateNamespace(Namespace):
        """A namespace without private names, through which templates could reach Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            names = dict(*args[1:], **kwargs)
            for name in names:
                check_public(name)
            Namespace.__init__(args[0], names)

        def __setitem__(self, name: str, value: Any) -> None:
            check_public(name)
            super().__setitem__(name, value)

    return TemplateNamespace


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as templates expect it: Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
