"""`shoal verify`: checks an answer of `shoal serve` against a model, on any machine.

The answer's "shoal" part has the prompt, the seed, the tokens, the log-probs and the proofs. The check repeats the computation with
the given model, as a validator does: other weights, another temperature, chosen tokens and edited text do not match.
"""

import argparse
import base64
import binascii
import json
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from shoal.cli.commands.sample_answers import model_folder
from shoal.cli.ui.values import check_device
from shoal.model.load_model import DTYPES, load_causal
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.rollout.engine.api import FinishedRow
from shoal.swarm.validator.fact_checks import check_facts
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy
from shoal.swarm.validator.recompute import recompute
from shoal.telemetry import printable
from shoal.wire.codes import Rejected
from shoal.wire.record import Record
from shoal.wire.rollouts import Finish, Rollout
from shoal.wire.run_spec import ProofSpec, Sampling, default_tolerances

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
MAX_RESPONSE_BYTES = 256 << 20
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Temperatures of an answer. Logits divided by a much smaller one are not finite, so that no token could be drawn."""


class Turn(Record):
    """A message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class AskedPrompt(Record):
    """The prompt as the client sent it: a text, or the turns of a chat."""

    text: str | None = None
    turns: tuple[Turn, ...] | None = None


class AnsweredRow(Record):
    """One choice of an answer."""

    output_tokens: tuple[int, ...] = Field(min_length=1)
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    proof: str
    """Proofs in base64."""

    def rollout(self, prompt: tuple[int, ...], index: int) -> Rollout:
        try:
            proof = base64.b64decode(self.proof, validate=True)
        except binascii.Error as error:
            raise Rejected("reject.malformed_proof", f"proof of choice {index}: {error}") from None
        return Rollout(
            prompt_index=0,
            sample_index=index,
            prompt_tokens=prompt,
            output_tokens=self.output_tokens,
            logprobs=self.logprobs,
            finish=Finish.EOS if self.finish == "stop" else Finish.LENGTH,
            proof=proof,
        )


class AnswerEvidence(Record):
    """What `shoal verify` needs of an answer, under "shoal" in it."""

    seed: str = Field(pattern="^[0-9a-f]{64}$")
    temperature: float = Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    max_new_tokens: int = Field(ge=1)
    samples: int = Field(ge=1)
    compute_dtype: Literal["float32", "bfloat16"]
    proof: ProofSpec
    prompt: AskedPrompt
    prompt_tokens: tuple[int, ...] = Field(min_length=1)
    rows: tuple[AnsweredRow, ...] = ()

    @property
    def sampling(self) -> Sampling:
        """The sampling settings as a lease has them."""
        return Sampling(
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            samples_per_prompt=self.samples,
        )

    def with_rows(self, rows: Iterable[FinishedRow]) -> "AnswerEvidence":
        answered = tuple(
            AnsweredRow(
                output_tokens=row.output_tokens,
                logprobs=row.logprobs,
                finish="stop" if row.finish is Finish.EOS else "length",
                proof=base64.b64encode(row.proof).decode(),
            )
            for row in rows
        )
        return self.model_copy(update={"rows": answered})


def prompt_tokens(tokenizer: Tokenizer, prompt: AskedPrompt) -> list[int]:
    """Returns the tokens of a prompt. Turns go through the model's chat template."""
    if prompt.turns is None:
        return tokenizer.encode_prompt(prompt.text or "", chat=False)
    return tokenizer.encode_turns([turn.model_dump() for turn in prompt.turns])


def answer_text(tokenizer: Tokenizer, output_tokens: Sequence[int]) -> str:
    """Returns the text of an answer, without the end token."""
    end = len(output_tokens) - (output_tokens[-1] in tokenizer.end_tokens)
    return tokenizer.decode(output_tokens[:end])


def read_response(path: Path) -> tuple[AnswerEvidence, list[str]]:
    """Returns the evidence of a stored answer and the text of each choice. Raises Rejected or ValueError."""
    data = path.read_bytes()
    if len(data) > MAX_RESPONSE_BYTES:
        raise ValueError(f"{path} has {len(data)} bytes, at most {MAX_RESPONSE_BYTES}")
    try:
        response = json.loads(data)
        texts = [
            str(choice["message"]["content"] if "message" in choice else choice["text"])
            for choice in response["choices"]
        ]
        evidence = response["shoal"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no answer of shoal serve: {type(error).__name__} {error}; store the whole response as JSON"
        ) from None
    return AnswerEvidence.parse(json.dumps(evidence)), texts


def check_words(evidence: AnswerEvidence, texts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Checks what needs no computation: prompt, texts, lengths and ends. Raises Rejected."""
    if not len(evidence.rows) == len(texts) == evidence.samples:
        raise Rejected(
            "reject.incomplete_group",
            f"{len(texts)} choices and {len(evidence.rows)} proven rows, {evidence.samples} were asked for",
        )
    if tuple(prompt_tokens(tokenizer, evidence.prompt)) != evidence.prompt_tokens:
        raise Rejected("reject.edited_prompt", "the prompt's tokens are not those of its text")
    for index, (row, text) in enumerate(zip(evidence.rows, texts, strict=True)):
        _check_row(index, row, evidence.max_new_tokens, tokenizer)
        if text != answer_text(tokenizer, row.output_tokens):
            raise Rejected("reject.bad_values", f"choice {index}: the text is not that of the proven tokens")


def _check_row(index: int, row: AnsweredRow, max_new_tokens: int, tokenizer: Tokenizer) -> None:
    tokens = row.output_tokens
    if len(row.logprobs) != len(tokens) or len(tokens) > max_new_tokens:
        raise Rejected(
            "reject.bad_values",
            f"choice {index}: {len(tokens)} tokens of at most {max_new_tokens}, {len(row.logprobs)} log-probs",
        )
    if min(tokens) < 0 or max(tokens) >= tokenizer.vocab_size:
        raise Rejected("reject.bad_values", f"choice {index}: a token is not in the model's vocabulary")
    ends = [at for at, token in enumerate(tokens) if token in tokenizer.end_tokens]
    expected = [len(tokens) - 1] if row.finish == "stop" else []
    if ends != expected or (row.finish == "length" and len(tokens) != max_new_tokens):
        raise Rejected("reject.early_stop", f"choice {index}: finish={row.finish!r} does not fit its tokens")


def verify_response(path: Path, folder: Path, *, dtype: str | None, device: str) -> AnswerEvidence:
    """Checks a stored answer against the model in `folder` and returns its evidence. Raises Rejected if it does not match."""
    evidence, texts = read_response(path)
    tokenizer = load_tokenizer(folder)
    check_words(evidence, texts, tokenizer)
    rows = [row.rollout(evidence.prompt_tokens, index) for index, row in enumerate(evidence.rows)]
    model = load_causal(folder, DTYPES[dtype or evidence.compute_dtype], device)
    facts = recompute(rows, evidence, LoadedPolicy(0, model, tokenizer), control_seed=secrets.randbits(63))
    check_facts(rows, facts, default_tolerances(evidence.compute_dtype))
    return evidence


def verify(options: argparse.Namespace, stop: threading.Event) -> int:
    """Prints whether an answer is the model's. Returns 1 if it is not."""
    check_device(options.device)
    with model_folder(options.model) as folder:
        try:
            evidence = verify_response(options.response, folder, dtype=options.dtype, device=options.device)
        except Rejected as refusal:
            result: dict[str, Any] = {"verified": False, "code": refusal.code, "reason": refusal.detail}
        except CannotCheck as error:
            raise ValueError(
                f"{options.response} cannot be checked on this machine: {error}; use another one, or --device cuda"
            ) from None
        else:
            num_tokens = sum(len(row.output_tokens) for row in evidence.rows)
            result = {"verified": True, "choices": len(evidence.rows), "tokens": num_tokens}
    if options.json:
        print(json.dumps(result))
    elif result["verified"]:
        print(f"verified: {result['choices']} choices of {result['tokens']} tokens are {options.model}'s")
    else:
        print(printable(f"NOT VERIFIED: {result['code']}: {result['reason']}"))
    return 0 if result["verified"] else 1
