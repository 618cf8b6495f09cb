"""The formula of a trainer's memory, and the refusal of a model that is too large for the machine."""

import threading
from pathlib import Path

import pytest
import torch

from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.telemetry import Log
from shoal.trainer import memory
from shoal.trainer.config import TrainerConfig
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.memory import free_bytes, trainer_memory


def test_seven_billion_parameters_fit_on_one_h200_with_one_byte_moments() -> None:
    """139 GiB, of which activations of a long row need a few tens."""
    exact = trainer_memory(7.6e9, TrainerConfig(compute_dtype="bfloat16"))
    compact = trainer_memory(7.6e9, TrainerConfig(compute_dtype="bfloat16", optimizer_states="int8"))
    assert exact.device == pytest.approx(18 * 7.6e9)
    assert compact.device == pytest.approx(12.03 * 7.6e9)
    assert compact.device < 0.65 * 139 * 2**30 < exact.device


def test_adapters_of_32_billion_parameters_fit_on_one_h200() -> None:
    config = TrainerConfig(compute_dtype="bfloat16", lora_rank=16)
    found = trainer_memory(32.8e9, config, num_adapted=134e6)
    assert found.device < 70e9
    assert trainer_memory(32.8e9, TrainerConfig(), ranks=8).device == pytest.approx(16 * 32.8e9 / 8)


def test_the_reference_of_the_kl_term_is_counted_in_host_memory() -> None:
    """6 bytes per parameter beside the optimizer: the published file, and version 0's weights on all ranks together."""
    found = trainer_memory(1e9, TrainerConfig(kl=0.001), ranks=8)
    assert found.published + 8 * found.reference == pytest.approx(6e9)
    assert trainer_memory(1e9, TrainerConfig()).reference == 0


def test_a_model_that_is_too_large_is_refused_before_it_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda place: 1e6)
    lockstep = Lockstep(
        TrainerConfig(), SINGLE_PROCESS, device="cpu", log=Log("trainer"), stop=threading.Event()
    )
    with pytest.raises(
        ValueError,
        match=r"need .* GB of memory \(host\): weights .* 0.0 GB are free; set trainer.optimizer_states",
    ):
        lockstep.create_learner(model)
    assert not hasattr(lockstep, "learner")


def test_files_in_the_page_cache_count_as_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container counts the model's files, which have just been read, as used memory."""
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 7 << 30)
    assert free_bytes("host") == 7 << 30


@pytest.mark.parametrize("refused", [False, True])
def test_a_gpu_that_refuses_to_pin_memory_does_not_fail_the_next_kernel(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports a refusal once more to whoever launches the next kernel."""
    calls: list[str] = []

    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            calls.append(f"pin {address}+{num_bytes}")
            return 2 if refused else 0

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(f"unpin {address}")

    def next_kernel(*_: object, **__: object) -> None:
        calls.append("kernel")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "ones", next_kernel)
    assert memory.pin_memory(4096, 100) is not refused
    memory.unpin_memory(4096)
    assert calls == ["pin 4096+100", *["kernel"] * refused, "unpin 4096"]
