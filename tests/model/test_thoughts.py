"""Which templates make a model think first, and what of its answer is graded then."""

import json
from pathlib import Path

import pytest
from test_chat_template import LLAMA3, QWEN3, QWEN25, QWQ
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from shoal.model.builtin import create_model
from shoal.model.chat_template import template_thinks
from shoal.model.tokenizer import ChatSetting, FileTokenizer, load_tokenizer
from shoal.tasks import Outcome, Problem, make_task
from shoal.tasks.task_errors import grade_answer
from shoal.wire.run_spec import TaskSpec

QWEN3_WITHOUT = "{%- set enable_thinking = false %}" + QWEN3
MENTIONED = QWEN25 + "{# <think> is not used #}"
R, U = Outcome.RIGHT, Outcome.UNPARSEABLE
TOKENS = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("template", "thinks"),
    [
        (QWQ, True),
        (QWEN3, True),
        (QWEN3_WITHOUT, False),
        (QWEN25, False),
        (LLAMA3, False),
        (MENTIONED, False),
    ],
    ids=["qwq", "qwen3", "qwen3 without thinking", "qwen2.5", "llama 3", "mentioned"],
)
def test_the_template_decides(template: str, thinks: bool) -> None:
    assert template_thinks(template, TOKENS) is thinks


def make_tokenizer(folder: Path, template: str | None, *, special: bool = False) -> FileTokenizer:
    """Returns a tokenizer of bytes that has the two marks of a thought as tokens."""
    create_model("tiny", folder, seed=0)
    (folder / "char_tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0, "vocab_size": 400}))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({token: index for index, token in enumerate(["<e>", *letters])}, []))
    raw.add_special_tokens(["<e>"])
    raw.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in ("<think>", "</think>")])
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<e>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


@pytest.mark.parametrize("special", [False, True])
def test_the_end_of_a_thought_survives_decoding(tmp_path: Path, special: bool) -> None:
    tokenizer = make_tokenizer(tmp_path / "m", QWQ, special=special)
    tokens = tokenizer.encode_answer("so 41</think>42")
    assert tokenizer.decode(tokens) == "so 41</think>42"
    assert tokenizer.thinks(chat=True) and not tokenizer.thinks(chat=False)
    assert tokenizer.decode(tokenizer.encode_answer("42")) == "42"


@pytest.mark.parametrize(
    ("template", "text", "outcome"),
    [
        (QWQ, "maybe 42, or let me check again", U),
        (QWQ, "maybe 41</think>\n42", R),
        (QWQ, "<think>maybe 42", U),
        (QWEN3, "<think>\nmaybe 42", U),
        (QWEN3, "<think>\nmaybe 41\n</think>\n42", R),
        (QWEN3, "<think>\n42\n</think>\n", U),
        (QWEN3, "42", U),
        (QWEN3_WITHOUT, "42", R),
        (QWEN25, "42", R),
        (QWEN25, "<think> 42", R),
        (QWEN25, "<think> 41 </think> 42", R),
        (None, "42", R),
    ],
)
def test_only_what_follows_the_thought_is_graded(
    tmp_path: Path, template: str | None, text: str, outcome: Outcome
) -> None:
    tokenizer = make_tokenizer(tmp_path / "m", template)
    task = make_task(TaskSpec(name="add"))
    answer = tokenizer.decode(tokenizer.encode_answer(text))
    reward = grade_answer(task, Problem("40 + 2", "42"), answer, 5, thinks=tokenizer.thinks(chat=task.chat))
    assert (reward.outcome, reward.value) == (outcome, float(outcome is R))


def test_an_open_thought_still_costs_its_length() -> None:
    task = make_task(TaskSpec(name="add", budgets=(100,), budget_alpha=0.001))
    problem = task.problem("train", 0)
    reward = grade_answer(task, problem, problem.answer, 300, thinks=True)
    assert reward.outcome is U and reward.value == pytest.approx(-0.2)


def test_messages_and_arguments_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
    )
    tokenizer = make_tokenizer(tmp_path / "model", template)
    setting = ChatSetting((("system", "Be terse."),), {"enable_thinking": False})
    text = tokenizer.decode(tokenizer.encode_prompt("Why?", chat=True, setting=setting))
    assert text == "[system]Be terse.[user]Why?[assistant]<think></think>"
    assert tokenizer.thinks(chat=True)
    assert not tokenizer.thinks(chat=True, setting=ChatSetting((), {"enable_thinking": False}))
    # An argument cannot replace the conversation.
    forged = ChatSetting((), {"messages": "none"})
    assert tokenizer.encode_prompt("x", chat=True, setting=forged) == tokenizer.encode_prompt("x", chat=True)
    plain = make_tokenizer(tmp_path / "plain", None)
    assert plain.decode(plain.encode_prompt("Why?", chat=True, setting=setting)) == "Be terse.\n\nWhy?"
