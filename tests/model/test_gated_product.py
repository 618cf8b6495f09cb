"""The gated product in one kernel equals a matrix product followed by silu_mul.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/model/test_gated_product.py
"""

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("num_rows", "hidden", "half"), [(1, 64, 64), (130, 72, 96), (300, 576, 1536)])
def test_the_kernel_equals_product_and_gate(
    num_rows: int, hidden: int, half: int, kernel_device: str
) -> None:
    from shoal.model.kernels import elementwise  # needs Triton

    dtype = torch.float16 if kernel_device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    x_TH = torch.randn(num_rows, hidden, device=kernel_device, dtype=dtype)
    gate_up_FH = torch.randn(2 * half, hidden, device=kernel_device, dtype=dtype) / hidden**0.5
    gate_TF, up_TF = F.linear(x_TH, gate_up_FH).float().chunk(2, dim=1)
    assert elementwise.fits_gated_product(x_TH, gate_up_FH)
    if kernel_device == "cuda" and not elementwise.has_tile_copies(x_TH):
        pytest.skip("the kernel is for Hopper and later devices")
    found_TF = elementwise.launch_gated_product(x_TH, gate_up_FH)
    torch.testing.assert_close(found_TF.float(), F.silu(gate_TF) * up_TF, atol=0.02, rtol=0.02)


def test_unsupported_sizes_and_dtypes_are_left_to_torch(kernel_device: str) -> None:
    from shoal.model.kernels import elementwise

    x_TH = torch.zeros(3, 20, device=kernel_device, dtype=torch.float16)
    assert not elementwise.fits_gated_product(x_TH, x_TH.new_zeros(64, 20))
    assert not elementwise.fits_gated_product(x_TH.new_zeros(3, 64), x_TH.new_zeros(24, 64))
    assert not elementwise.fits_gated_product(torch.zeros(3, 64), torch.zeros(64, 64))  # float32
    if kernel_device == "cuda":
        assert elementwise.gated_product(x_TH, x_TH.new_zeros(64, 20)).shape == (3, 32)
