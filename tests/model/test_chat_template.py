"""Chat templates: the same text as transformers gives, and hostile ones end with an error."""

import json
import time
from typing import Any

import pytest

from shoal.child_process import ChildLimits, ChildProcess
from shoal.model.chat_template import MAX_PROMPT_CHARS, MAX_TEMPLATE_CHARS, render_chat

TURNS = [{"role": "user", "content": "  What is 1 < 2 & “3”?\n"}]
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{{- tools | tojson }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWQ = QWEN25.replace("assistant\\n' }}\n{%- endif %}\n", "assistant\\n<think>\\n' }}\n{%- endif %}\n")
QWEN3 = """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
{% endif %}
{% endfor %}
"""
GEMMA = """{{ bos_token }}
{% macro turn(role, text) -%}
{{ '<start_of_turn>' + role + '\\n' + text | trim + '<end_of_turn>\\n' }}
{%- endmacro %}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ turn(role, message['content']) }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
OTHER = """{% for m in messages %}
  {% if loop.index > 3 %}{% break %}{% endif %}
    {% generation %}[{{ m.content | trim | tojson }}]{% endgeneration %}
  {{ {'b': '<é>', 'a': [1, 2.5, none, true]} | tojson(indent=2) }}
  {{ dict(a=1).items() | list }} {{ joiner(', ')() }} {{ cycler('x', 'y').next() }}
  {{ tools is none }} {{ documents is none }} {{ undefined_name is defined }} {{ undefined_name }}
  {%- for i in range(5) if i is odd %} {{ i }}{% if loop.last %}.{% endif %}{% else %}none{% endfor %}
{% endfor %}
{% if add_generation_prompt %}<a>{% endif %}
"""
TEMPLATES = {
    "qwen2.5": QWEN25,
    "qwq": QWQ,
    "qwen3": QWEN3,
    "llama 3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "other": OTHER,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    answer: Any = render_jinja_template(
        conversations=[TURNS], chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS
    )
    text = render_chat(TEMPLATES[name], TURNS, TOKENS)
    assert text == answer[0][0]
    assert "What is 1 < 2" in text


def test_several_turns_render_as_transformers_renders_them() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [*TURNS, {"role": "assistant", "content": "<think>x</think>\n\nyes"}, *TURNS]
    for template in (QWEN25, QWEN3, LLAMA3, MISTRAL, GEMMA):
        answer: Any = render_jinja_template(
            conversations=[turns], chat_template=template, add_generation_prompt=True, **TOKENS
        )
        assert render_chat(template, turns, TOKENS) == answer[0][0]


def test_the_date_is_in_utc() -> None:
    before = time.strftime("%d %b %Y", time.gmtime())
    text = render_chat("{{ strftime_now('%d %b %Y') }}", TURNS, TOKENS)
    assert text in (before, time.strftime("%d %b %Y", time.gmtime()))


def test_an_exception_of_the_template_is_reported() -> None:
    with pytest.raises(ValueError, match=r"cannot be rendered: TemplateError: roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", TURNS, TOKENS)
    with pytest.raises(ValueError, match=r"cannot be rendered: TemplateSyntaxError"):
        render_chat("{% for %}", TURNS, TOKENS)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HANGING = {
    "nested range": LOOP,
    "loops over strings": "{% set x = 'x' * 90000 %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "a filter": "{% for a in range(99999) %}{{ range(99999) | sort | first }}{% endfor %}",
    "macros that call each other": "{% macro f(n) %}{% for i in range(9) %}{{ f(n + 1) if n < 50 }}{% endfor %}{% endmacro %}{{ f(0) }}",
}
HUGE = {
    "a long string": "{{ 'x' * 10000000000 }}",
    "a padded number": "{{ '%02000000000d' % 1 }}",
    "a format": "{{ '{:>2000000000}'.format(1) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "much output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "a list": "{{ [0] * 10000000000 }}",
    "a center": "{{ 'x' | center(3000000000) }}",
}


@pytest.mark.parametrize("name", HANGING)
def test_a_template_that_hangs_ends_with_an_error(name: str) -> None:
    render_chat("warm up", TURNS, TOKENS)
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=r"0\.5 s of processor time|too deeply|memory"):
        render_chat(HANGING[name], TURNS, TOKENS)
    assert time.monotonic() - began_s < 10  # 0.5 s on an idle machine
    assert render_chat("{{ messages[0].role }}", TURNS, TOKENS) == "user"


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_makes_huge_texts_ends_with_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"memory|longer than|time|OverflowError|too large|too many"):
        render_chat(HUGE[name], TURNS, TOKENS)
    assert render_chat("{{ messages[0].role }}", TURNS, TOKENS) == "user"


def test_a_single_long_operation_ends_with_the_child() -> None:
    with pytest.raises(ValueError, match=r"time|memory"):
        render_chat("{{ 7 ** (10 ** 9) }}", TURNS, TOKENS)
    assert render_chat("{{ messages[0].role }}", TURNS, TOKENS) == "user"


def test_a_child_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ChildProcess("not:used", limits=ChildLimits(memory_bytes=1, cpu_s=1), python="/no/such/python")
    monkeypatch.setattr("shoal.model.chat_template._child", missing)
    with pytest.raises(ValueError, match=r"cannot be rendered: .* cannot be started"):
        render_chat("{{ messages[0].content }}", [{"role": "user", "content": "x"}], {})


def test_sizes_are_limited() -> None:
    assert len(render_chat("{{ 'x' * " + str(MAX_PROMPT_CHARS) + " }}", TURNS, TOKENS)) == MAX_PROMPT_CHARS
    with pytest.raises(ValueError, match=f"longer than {MAX_PROMPT_CHARS} characters"):
        render_chat("{{ 'x' * " + str(MAX_PROMPT_CHARS + 1) + " }}", TURNS, TOKENS)
    with pytest.raises(ValueError, match=f"at most {MAX_TEMPLATE_CHARS} are allowed"):
        render_chat("x" * (MAX_TEMPLATE_CHARS + 1), TURNS, TOKENS)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '' | attr('__class__') }}",
        "{{ ('' | attr('__cl' ~ 'ass__')).__mro__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ joiner.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0.__class__}'.format_map({'0': ''}) }}",
        "{{ ['{0.__class__}'] | map('format', '') | list }}",
        "{{ ('{0.__init__.__globals__}' | attr('format'))(cycler) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ messages.append(1) }}",
        "{{ lipsum.__globals__ }}",
        "{{ config }}{{ request.application.__globals__ }}",
    ],
)
def test_a_template_does_not_reach_python(attack: str) -> None:
    """The rendering fails, or gives text without anything of Python's internals."""
    try:
        text = render_chat(attack, TURNS, TOKENS)
    except ValueError as error:
        assert "cannot be rendered" in str(error)
    else:
        assert not any(word in text for word in ("class", "uid=", "root:", "builtins", "module", "function"))


def test_requests_are_plain_data() -> None:
    """What a template sees is JSON: strings, lists and dictionaries."""
    text = render_chat("{{ messages | tojson }}", TURNS, TOKENS)
    assert json.loads(text) == TURNS
