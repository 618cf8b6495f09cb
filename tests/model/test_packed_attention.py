"""Segments of packed samples; on CUDA, attention by segments and kernels compared with plain torch."""

import pytest
import torch

from shoal.model.decoder import LONG, Decoder, find_segments
from shoal.model.logprobs import _gradient, _reduced, token_scores
from shoal.model.shape import Rope, Shape

SHAPE = Shape(
    vocab_size=9001,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=512,
    rope=Rope(),
    norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=True,
    max_positions=4 * LONG,
)


def test_segments_end_with_ids_and_with_rows() -> None:
    found = find_segments(torch.tensor([[0, 0, 0, 1, 1, -1], [1, 1, 1, 1, 1, 1]]))
    assert found.starts_S.tolist() == [0, 3, 5, 6, 12, 12, 12, 12]
    assert found.longest == 8
    assert found.spans == ()


def test_few_long_samples_are_computed_one_by_one() -> None:
    found = find_segments(torch.zeros(2, LONG, dtype=torch.long))
    assert found.spans == ((0, LONG), (LONG, 2 * LONG))


@pytest.mark.parametrize("chunk", [4, 7])
def test_entropy_and_its_gradient_equal_the_plain_formula(chunk: int) -> None:
    torch.manual_seed(0)
    decoder = Decoder(SHAPE)
    hidden_NH = torch.randn(12, 256, requires_grad=True)
    targets_N = torch.randint(0, SHAPE.vocab_size, (12,))
    of_logprob_N, of_entropy_N = torch.randn(12), torch.randn(12)
    wanted = [hidden_NH, decoder.model.embed_tokens.weight]

    logp_NV = (decoder.logits(hidden_NH) / 0.7).log_softmax(-1)
    logprobs_N, entropy_N = logp_NV[torch.arange(12), targets_N], -(logp_NV.exp() * logp_NV).sum(-1)
    plain = torch.autograd.grad((logprobs_N * of_logprob_N + entropy_N * of_entropy_N).sum(), wanted)
    ours = token_scores(decoder, hidden_NH, targets_N, temperature=0.7, chunk=chunk)
    torch.testing.assert_close(ours.logprobs_N, logprobs_N, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.entropy_N, entropy_N, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(
        (ours.logprobs_N * of_logprob_N + ours.entropy_N * of_entropy_N).sum(), wanted
    )
    for mine, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[300, 17, 1, 700], [LONG + 5, LONG]])
def test_attention_by_segments_equals_the_dense_mask(lengths: list[int]) -> None:
    torch.manual_seed(0)
    exact = Decoder(SHAPE).cuda()
    fast = Decoder(SHAPE).cuda()
    fast.load_state_dict(exact.state_dict())
    fast.to(torch.bfloat16)
    segments = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])[None].cuda()
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    tokens = torch.randint(0, SHAPE.vocab_size, positions.shape, device="cuda")
    weight = torch.randn(1, sum(lengths), SHAPE.hidden_size, device="cuda")
    states = [model(tokens, positions, segments_BT=segments) for model in (exact, fast)]
    for state in states:
        (state * weight.to(state.dtype)).sum().backward()
    assert (states[1] - states[0]).norm() < 0.02 * states[0].norm()
    for (name, one), other in zip(exact.named_parameters(), fast.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (other.grad - one.grad).norm() < 0.05 * one.grad.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_plain_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits_NV = (4 * torch.randn(33, SHAPE.vocab_size)).to(dtype)
    targets_N = torch.randint(0, SHAPE.vocab_size, (33,))
    gradients = (torch.randn(33), torch.randn(33))
    plain = _reduced(logits_NV, targets_N, 0.7)
    kernel = _reduced(logits_NV.cuda(), targets_N.cuda(), 0.7)
    for mine, expected in zip(kernel, plain, strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=1e-4, atol=1e-4)
    expected = _gradient(logits_NV, targets_N, plain[1:], gradients, 0.7)
    found = _gradient(
        logits_NV.cuda(), targets_N.cuda(), kernel[1:], (gradients[0].cuda(), gradients[1].cuda()), 0.7
    )
    torch.testing.assert_close(
        found.cpu(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-4
    )
