"""What a trainer holds in memory, in bytes, and the check before a model is loaded.

    each rank, on its device    weights, gradients, AdamW's moments: divided among the ranks; without several ranks a bfloat16 copy
    rank 0, in host memory      the published file (2 bytes per parameter); while a checkpoint is copied, weights and moments again
    each rank, in host memory   with a KL term version 0's weights in float32: divided among the ranks

Activations come on top (cli.run.estimate knows the model's shape). On a CPU both are the same memory.
"""

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

from shoal.files import free_memory_bytes
from shoal.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes of one trainer process, without activations."""

    weights: float
    """Master weights, frozen weights, and the copy in another number format, if there is one."""
    gradients: float
    moments: float
    published: float
    """Host memory of rank 0: the published file."""
    checkpoint: float
    """Host memory while a checkpoint is copied and written."""
    reference: float
    """Host memory of each rank: its part of version 0's weights, for the KL term."""

    @property
    def device(self) -> float:
        return self.weights + self.gradients + self.moments


def trainer_memory(
    num_parameters: float,
    config: TrainerConfig,
    *,
    ranks: int = 1,
    num_adapted: float = 0,
    sharded: bool = False,
) -> TrainerMemory:
    """Returns what a trainer of a model holds. With adapters, `num_adapted` is the number of their parameters.

    Several ranks shard the weights; `sharded` is set for a single rank that computes as one of several.
    """
    trained = num_adapted if config.lora_rank else num_parameters
    frozen = num_parameters if config.lora_rank else 0
    moments = 2.03 if config.optimizer_states == "int8" else 8
    computes_in_bfloat16 = config.compute_dtype == "bfloat16"
    copied = 0 if sharded or ranks > 1 or not computes_in_bfloat16 else 2
    return TrainerMemory(
        weights=((4 + copied) * trained + (2 if computes_in_bfloat16 else 4) * frozen) / ranks,
        gradients=4 * trained / ranks,
        moments=moments * trained / ranks,
        published=2 * num_parameters,
        checkpoint=trained * (4 + (moments if ranks == 1 else 8)) / ranks,
        reference=4 * trained / ranks if config.kl else 0.0,
    )


def check_memory(model_folder: Path, config: TrainerConfig, *, device: str, ranks: int) -> None:
    """Raises ValueError, with the numbers and what to do, if the model cannot fit on this machine.

    Activations are not counted, so a model that passes may still be too large for its rows.
    """
    num_parameters = sum(path.stat().st_size for path in model_folder.glob("*.safetensors")) / 2
    memory = trainer_memory(num_parameters, config, ranks=ranks)
    on_cpu = device.partition(":")[0] == "cpu"
    needs = {
        "host": memory.published
        + ((memory.device + memory.reference) * ranks if on_cpu else memory.reference)
    }
    if not on_cpu:
        needs[device] = memory.device
    for place, needed in needs.items():
        if needed > (free := free_bytes(place)):
            raise ValueError(
                f"{model_folder.name}: {num_parameters / 1e9:.2f} billion parameters need {needed / 1e9:.1f} GB of memory ({place}): "
                f"weights {memory.weights / 1e9:.1f}, gradients {memory.gradients / 1e9:.1f}, moments {memory.moments / 1e9:.1f} a rank, "
                f"published file {memory.published / 1e9:.1f}, reference of the KL term {memory.reference / 1e9:.1f}; "
                f"{free / 1e9:.1f} GB are free; set trainer.optimizer_states = "
                '"int8", train adapters (trainer.lora_rank), or use more ranks (torchrun)'
            )


def free_bytes(place: str) -> float:
    """Returns the memory that is free on a CUDA device or, for "host", on this machine; infinity if the system does not say."""
    if place == "host":
        return free_memory_bytes() if Path("/proc/meminfo").exists() else math.inf
    import torch  # `shoal run --dry-run` needs the formula without it

    return torch.cuda.mem_get_info(place)[0]


def pin_memory(address: int, num_bytes: int) -> bool:
    """Pins host memory, which a GPU then copies at the bus's full speed. Returns False if the system refuses: copies are slower."""
    import torch

    if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0:
        return True
    # CUDA keeps the refusal as its last error, and the next kernel that is launched reports it.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False


def unpin_memory(address: int) -> None:
    """Unpins memory that `pin_memory` has pinned."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)
