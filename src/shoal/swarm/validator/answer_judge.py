"""Runs the judge model of a task over the answers of a submission and returns their rewards with the judge's texts.

The judge is loaded once and stays in memory. It writes greedily, so that an audit of the same submission gets the same texts; the
rewards are compared with a small tolerance, since another processor may round a near tie to another token.
"""

import functools
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder
from shoal.model.greedy import generate_greedily
from shoal.model.load_model import DTYPES, decoder_refuses, load_causal
from shoal.model.tokenizer import load_tokenizer
from shoal.model.transformers_model import TransformersModel
from shoal.net.waiting import Stopped
from shoal.tasks.datasets.file_options import unpacked_folder
from shoal.tasks.datasets.judged_answers import JudgedAnswers, check_judge_folder
from shoal.tasks.grading.pool import Answer, grading_pool
from shoal.tasks.task import THOUGHT_END, UNPARSEABLE, CannotGrade, Reward

MAX_TEXT = 2000
"""Characters of the judge's text that a transcript keeps."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The reward of an answer, and the judge's text or why it has none."""

    reward: Reward
    text: str


class JudgeModel:
    """A judge model in memory."""

    def __init__(self, path: str, dtype: str, device: str) -> None:
        try:
            check_judge_folder(path)
            folder = unpacked_folder(Path(path))
            self._tokenizer = load_tokenizer(folder)
            self._model = _load_model(folder, DTYPES[dtype], device)
        except (OSError, ValueError, KeyError) as error:
            raise CannotGrade(f"the judge model {path} cannot be loaded: {error}") from None

    def judge(
        self, task: JudgedAnswers, answers: Sequence[Answer], stop: threading.Event | None = None
    ) -> list[Judgement]:
        """Returns the judgement of each answer, in order. Raises CannotGrade, and Stopped if `stop` is set.

        An answer without a reply, one that contains a special token of the judge, and one that is too long for it get reward 0.
        """
        if task.judge_tokens >= (most := self._model.shape.max_positions):
            raise CannotGrade(
                f"judge_tokens = {task.judge_tokens} leave no room for a prompt in the judge's {most} positions; lower judge_tokens"
            )
        prompts = [self._prompt(task, answer) for answer in answers]
        # The samples of a prompt often have the same text: each is judged once.
        asked = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, tuple)))
        written = generate_greedily(
            self._model,
            asked,
            max_new_tokens=task.judge_tokens,
            end_tokens=self._tokenizer.end_tokens,
            check=lambda: _check_stop(stop),
        )
        texts = {
            prompt: self._tokenizer.decode(tokens) for prompt, tokens in zip(asked, written, strict=True)
        }
        judged = [
            Answer(answer.problem, texts[prompt], 0)
            for answer, prompt in zip(answers, prompts, strict=True)
            if isinstance(prompt, tuple)
        ]
        rewards = iter(grading_pool().grade(task.score_reader(), judged, stop=stop) if judged else [])
        return [
            Judgement(next(rewards), texts[prompt][-MAX_TEXT:])
            if isinstance(prompt, tuple)
            else Judgement(UNPARSEABLE, prompt)
            for prompt in prompts
        ]

    def _prompt(self, task: JudgedAnswers, answer: Answer) -> tuple[int, ...] | str:
        """Returns the tokens of the judge's prompt, or why the answer is not judged."""
        reply = answer.text
        if answer.thinks and THOUGHT_END not in reply:
            return "(not judged: the answer never ends its thought)"
        reply = reply.rpartition(THOUGHT_END)[2]
        if not reply.strip():
            return "(not judged: the answer is empty)"
        tokens = self._encode(task.ask_judge(answer.problem, reply))
        if added := self._control_tokens(tokens) - self._control_tokens(
            self._encode(task.ask_judge(answer.problem, ""))
        ):
            # A special token would end the user's turn, and the text after it would look like the judge's own words. The tokens are
            # compared, not the texts: a tokenizer may normalize other characters, such as fullwidth ones, to those of a special token.
            return f"(not judged: the answer contains the judge's special token {next(iter(added))!r})"
        longest = self._model.shape.max_positions - task.judge_tokens
        if len(tokens) > longest:
            return f"(not judged: the prompt has {len(tokens)} tokens, the judge takes {longest})"
        return tuple(tokens)

    def _encode(self, prompt: str) -> list[int]:
        try:
            return self._tokenizer.encode_prompt(prompt, chat=True)
        except ValueError as error:
            raise CannotGrade(f"the judge's tokenizer cannot encode its prompt: {error}") from None

    def _control_tokens(self, tokens: Sequence[int]) -> Counter[str]:
        """Returns how often each special token occurs, by its text."""
        texts = self._tokenizer.control_tokens
        return Counter(texts[token] for token in tokens if token in texts)


def _load_model(folder: Path, dtype: torch.dtype, device: str) -> Decoder | TransformersModel:
    if decoder_refuses(folder) is None:
        return load_causal(folder, dtype, device)
    # transformers writes some families with other names than it computes with.
    with tempfile.TemporaryDirectory() as scratch:
        create_model(str(folder), Path(scratch) / "model", seed=0)
        return load_causal(Path(scratch) / "model", dtype, device)


def judge_answers(
    task: JudgedAnswers, answers: Sequence[Answer], *, device: str, stop: threading.Event | None = None
) -> list[Judgement]:
    """Returns the judgement of each answer by the task's judge, which is loaded at the first call."""
    return load_judge(task.judge_path, task.judge_dtype, device).judge(task, answers, stop)


@functools.lru_cache(maxsize=2)
def load_judge(path: str, dtype: str, device: str) -> JudgeModel:
    """Returns the judge model at `path`, the same object for the same arguments. Raises CannotGrade."""
    return JudgeModel(path, dtype, device)


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise Stopped("stopped between two tokens of the judge")
