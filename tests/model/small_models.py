"""Small random models of families that Decoder does not support, in folders as transformers writes them."""

from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.5, "use_parallel_residual": True, "tie_word_embeddings": False},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 4, "query_pre_attn_scalar": 32},
    "granite": {"num_key_value_heads": 2, "logits_scaling": 3.0, "residual_multiplier": 0.7},
    "bloom": {"n_layer": 2, "n_head": 4},
}

WITH_STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon_h1": {
        "num_key_value_heads": 2,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
    },
    "minimax": {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 16,
    },
}
"""Families whose layers keep other states than keys and values."""


def folder_of(family: str, folder: Path, **other: Any) -> Path:
    """Writes a random model of this family with transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **(SMALL | (FAMILIES | WITH_STATES)[family] | other))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
