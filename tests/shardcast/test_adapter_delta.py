"""Adapters as a payload: every receiver merges the same bits, and a payload that does not fit is refused."""

import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from memory_delta import encode

from shoal.shardcast.adapter_delta import (
    HEAD,
    MAGIC,
    AdapterMatrices,
    apply_adapters,
    decode_adapters,
    encode_adapters,
    merge_words,
)
from shoal.shardcast.delta import apply_deltas
from shoal.shardcast.file_image import FileImage
from shoal.wire.codes import CorruptData

pytest.importorskip("torch", reason="the other side of the comparison")
import torch
from safetensors.torch import save_file


def adapter(seed: int, rows: int = 24, columns: int = 40, rank: int = 4) -> AdapterMatrices:
    rng = np.random.default_rng(seed)
    a = rng.integers(-32767, 32768, (rank, columns)).astype(np.int16)
    b = rng.integers(-32767, 32768, (rows, rank)).astype(np.int16)
    return AdapterMatrices(name=f"layer.{seed}.weight", scale=3.1e-12, a=a, b=b)


def base_file(path: Path, adapters: list[AdapterMatrices]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        one.name: (0.02 * torch.randn(one.b.shape[0], one.a.shape[1])).bfloat16() for one in adapters
    } | {"norm.weight": torch.ones(7, dtype=torch.bfloat16)}
    save_file(dict(sorted(tensors.items())), path, metadata={"format": "pt"})
    return tensors


def test_numpy_and_torch_merge_the_same_bits_in_any_order_of_sums(tmp_path: Path) -> None:
    one = adapter(1, rows=200, columns=300, rank=64)
    base = base_file(tmp_path / "base", [one])[one.name]
    merged = merge_words(base.view(torch.int16).numpy().view(np.uint16).reshape(-1), one)
    order = np.random.default_rng(2).permutation(64)
    left, right = torch.from_numpy(one.b[:, order]).double(), torch.from_numpy(one.a[order]).double()
    with_torch = (left @ right).mul_(one.scale).add_(base.double()).float().bfloat16()
    assert np.array_equal(merged, with_torch.view(torch.int16).numpy().view(np.uint16).reshape(-1))
    assert (with_torch != base).float().mean() > 0.5


def test_a_file_with_adapters_added(tmp_path: Path) -> None:
    adapters = [adapter(1), adapter(2, rows=64, columns=8)]
    tensors = base_file(tmp_path / "base", adapters)
    num_bytes = (tmp_path / "base").stat().st_size
    (tmp_path / "payload").write_bytes(encode_adapters(adapters, num_bytes))
    digest = apply_deltas(tmp_path / "base", [tmp_path / "payload"], tmp_path / "merged")
    assert digest == blake3((tmp_path / "merged").read_bytes()).hexdigest()
    from safetensors.torch import load_file

    merged = load_file(tmp_path / "merged")
    assert torch.equal(merged["norm.weight"], tensors["norm.weight"])
    assert not torch.equal(merged["layer.1.weight"], tensors["layer.1.weight"])
    image = FileImage.read(tmp_path / "base")
    image.apply(tmp_path / "payload")
    assert image.digest() == digest


def test_words_that_changed_can_follow_adapters(tmp_path: Path) -> None:
    adapters = [adapter(1)]
    base_file(tmp_path / "base", adapters)
    (tmp_path / "adapters").write_bytes(encode_adapters(adapters, (tmp_path / "base").stat().st_size))
    apply_adapters(tmp_path / "base", tmp_path / "adapters", tmp_path / "v1")
    old = (tmp_path / "v1").read_bytes()
    new = old[:-2] + b"ab"
    (tmp_path / "words").write_bytes(encode(old, new))
    digest = apply_deltas(tmp_path / "base", [tmp_path / "adapters", tmp_path / "words"], tmp_path / "v2")
    assert digest == blake3(new).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapters", "base", "v1", "v2", "words"]


def frame(data: bytes, num_bytes: int) -> bytes:
    return HEAD.pack(MAGIC, num_bytes) + zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(
    "payload",
    [
        b"SHADAPT1",
        HEAD.pack(MAGIC, 9) + b"x",
        HEAD.pack(MAGIC, 5000) + b"no zstd frame",
        frame(b"", 5000),
        frame(struct.pack("<I", 2) + b"{}x", 5000),
        frame(struct.pack("<I", 3) + b"[1]", 5000),
        frame(struct.pack("<I", 2) + b"[]" + b"rest", 5000),
        frame(bytes(6000), 5000),
    ],
)
def test_what_is_no_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(CorruptData, match="adapter payload"):
        decode_adapters(payload, 5000)


@pytest.mark.parametrize("change", ["name", "shape", "scale", "rank"])
def test_adapters_that_do_not_fit_the_base_are_refused(tmp_path: Path, change: str) -> None:
    base_file(tmp_path / "base", [adapter(1)])
    one = adapter(1)
    wrong = {
        "name": AdapterMatrices(name="other", scale=1.0, a=one.a, b=one.b),
        "shape": AdapterMatrices(name=one.name, scale=1.0, a=one.a[:, :-1], b=one.b),
        "scale": AdapterMatrices(name=one.name, scale=float("nan"), a=one.a, b=one.b),
        "rank": AdapterMatrices(name=one.name, scale=1.0, a=one.a, b=one.b[:, :-1]),
    }[change]
    num_bytes = (tmp_path / "base").stat().st_size
    (tmp_path / "payload").write_bytes(encode_adapters([wrong], num_bytes))
    with pytest.raises(CorruptData):
        apply_adapters(tmp_path / "base", tmp_path / "payload", tmp_path / "merged")
