"""Chunked log-probs equal the plain formula, in value and in gradient."""

from pathlib import Path

import pytest
import torch

from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.logprobs import token_logprobs, token_scores


@pytest.mark.parametrize("chunk", [4, 5, 100])
def test_value_and_gradients_equal_the_plain_formula(chunk: int, tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=3)
    decoder = load_decoder(tmp_path / "m")
    torch.manual_seed(0)
    hidden_NH = torch.randn(12, decoder.shape.hidden_size, requires_grad=True)
    targets_N = torch.randint(0, decoder.shape.vocab_size, (12,))
    weights_N = torch.randn(12)
    parameters = [hidden_NH, decoder.model.embed_tokens.weight]

    plain_N = (decoder.logits(hidden_NH) / 0.7).log_softmax(-1)[torch.arange(12), targets_N]
    plain = torch.autograd.grad((plain_N * weights_N).sum(), parameters)
    ours_N = token_logprobs(decoder, hidden_NH, targets_N, temperature=0.7, chunk=chunk)
    ours = torch.autograd.grad((ours_N * weights_N).sum(), parameters)

    assert ours_N.dtype == torch.float32
    torch.testing.assert_close(ours_N, plain_N)
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected)


def test_no_tokens_give_no_logprobs(tmp_path: Path) -> None:
    create_model("tiny", tmp_path / "m", seed=3)
    decoder = load_decoder(tmp_path / "m")
    empty = token_logprobs(decoder, torch.zeros(0, 128), torch.zeros(0, dtype=torch.long), temperature=1.0)
    assert empty.shape == (0,)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_frozen_head_gives_the_same_gradient_with_its_logits_once(
    tmp_path: Path, temperature: float
) -> None:
    create_model("tiny", tmp_path / "m", seed=3)
    decoder = load_decoder(tmp_path / "m").requires_grad_(False)
    torch.manual_seed(0)
    hidden_NH = torch.randn(12, decoder.shape.hidden_size, requires_grad=True)
    targets_N = torch.randint(0, decoder.shape.vocab_size, (12,))
    weights_N = torch.randn(12)
    found = []
    for entropy_gradient in (True, False):
        scores = token_scores(
            decoder,
            hidden_NH,
            targets_N,
            temperature=temperature,
            chunk=5,
            entropy_gradient=entropy_gradient,
        )
        assert scores.entropy_N.requires_grad == entropy_gradient
        (gradient,) = torch.autograd.grad((scores.logprobs_N * weights_N).sum(), hidden_NH)
        found.append((scores.logprobs_N, scores.entropy_N, gradient))
    (logprobs_N, entropy_N, gradient), (once_logprobs_N, once_entropy_N, once) = found
    assert torch.equal(logprobs_N, once_logprobs_N) and torch.equal(entropy_N, once_entropy_N)
    torch.testing.assert_close(once, gradient)
