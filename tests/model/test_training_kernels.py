"""The kernels of a training step equal torch's operations, forward and backward.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/model/test_training_kernels.py
"""

import pytest
import torch
from torch.nn import functional as F

from shoal.model.decoder import rotate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1,), (3, 700), (2, 5, 1024)])
def test_the_gate_and_its_gradients_are_torchs(shape: tuple[int, ...], kernel_device: str) -> None:
    from shoal.model.kernels import elementwise  # needs Triton

    dtype = torch.float16 if kernel_device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    gate, up, gradient = (3 * torch.randn(shape, device=kernel_device).to(dtype) for _ in range(3))
    gate, up = gate.requires_grad_(), up.requires_grad_()
    expected = F.silu(gate) * up
    torch.testing.assert_close(elementwise.gate_product(gate.detach(), up.detach()), expected.detach())
    expected.backward(gradient)
    of_gate, of_up = elementwise.gate_gradients(gate.detach(), up.detach(), gradient)
    torch.testing.assert_close(of_gate, gate.grad)
    torch.testing.assert_close(of_up, up.grad)


@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 3, 64), (2, 40, 128), (2, 2, 80)])
def test_heads_are_rotated_and_back(rows: int, heads: int, head_dim: int, kernel_device: str) -> None:
    from shoal.model.kernels import elementwise

    dtype = torch.float16 if kernel_device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    angles = 100 * torch.rand(rows, 7, 1, head_dim // 2, device=kernel_device)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, cos, -sin, sin), dim=-1).to(dtype)  # as model.rope has it
    rope = (table[..., :head_dim], table[..., head_dim:])
    x = torch.randn(rows, 7, heads, head_dim, device=kernel_device).to(dtype).requires_grad_()
    expected = rotate(x, rope)
    found = elementwise.rotate_heads(x.detach(), *rope, sign=1.0)
    torch.testing.assert_close(found, expected.detach(), atol=0.01, rtol=0.01)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    back = elementwise.rotate_heads(gradient, *rope, sign=-1.0)
    torch.testing.assert_close(back, x.grad, atol=0.02, rtol=0.01)
