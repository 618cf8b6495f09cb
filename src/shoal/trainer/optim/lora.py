"""Low-rank adapters (peft): train two thin matrices beside every linear layer, publish the sum.

y = x W' + (alpha / rank) x A' B'         what trains, W frozen
W + (alpha / rank) B A                    what is published, under W's own name: nobody else knows of adapters
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from shoal.trainer.config import TrainerConfig
from shoal.trainer.optim.policy import Causal

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: Causal, config: TrainerConfig) -> None:
    """Put adapters beside every linear layer of every block, in place, and freeze the rest."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError(f"lora_rank={config.lora_rank} needs peft: pip install 'shoal-rl[lora]'") from None
    inside = {id(module) for block in model.blocks() for module in block.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]
    if not names:
        raise ValueError(
            f"lora_rank={config.lora_rank}: this model's blocks hold no nn.Linear; train all weights (lora_rank=0)"
        )
    settings = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=names)
    inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((_A, _B)))


def merged(base: Path, adapters: Mapping[str, Tensor], config: TrainerConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file `base`, with its adapter's product added where it has one; one at a time."""
    scale = config.lora_alpha / config.lora_rank
    unused = set(adapters)
    with safe_open(base, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            stem = name.removesuffix(".weight")
            weight: Tensor = file.get_tensor(name).float()
            if stem + _A in unused:
                weight += scale * (adapters[stem + _B].float() @ adapters[stem + _A].float())
                unused -= {stem + _A, stem + _B}
            yield name, weight
    assert not unused, f"adapters of layers that the base does not have: {sorted(unused)[:2]}"
