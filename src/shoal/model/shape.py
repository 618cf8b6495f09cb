"""Reads the sizes and settings of a Llama, Mistral, Qwen2 or Qwen3 model from its Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# Settings that would change the results. Decoder supports these values only.
_MUST_BE = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "pretraining_tp": 1}

LARGEST_NUMBER = 1e30
_ROPE_ABOVE = {"rope_theta": 1, "factor": 0, "beta_fast": 0, "beta_slow": 0}
"""Settings of rotations that other numbers are divided by, the first by its logarithm, and what they must be above."""
_NEEDED = (
    "num_attention_heads", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary settings of a config.json; names are Hugging Face's."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and settings of a decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rope: Rope
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, and rotations need pairs of values")


def read_shape(folder: Path) -> Shape:
    """Reads `folder`/config.json. Raises ValueError that names the setting if Decoder does not support it."""
    config = read_json(folder / "config.json")
    try:
        return _shape_of(config)
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: {error}") from None


def _shape_of(config: Mapping[str, Any]) -> Shape:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type={family!r} is not supported; known: {', '.join(FAMILIES)}")
    for key, only in _MUST_BE.items():
        if config.get(key, only) != only:
            raise ValueError(f"{key}={config[key]!r} is not supported; only {only!r}")
    if missing := [key for key in _NEEDED if key not in config]:
        raise ValueError(f"it has no {', '.join(missing)}; is it the config.json of a whole model?")
    if family != "qwen2" and config.get("attention_bias"):
        raise ValueError(f"attention_bias=true is not supported for {family}")
    positions = _whole(config, "max_position_embeddings")
    window = config.get("sliding_window") if family == "mistral" else None
    if window is not None and _whole(config, "sliding_window") < positions:
        raise ValueError(f"sliding_window={window} is not supported; only null")
    num_heads, hidden_size = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    return Shape(
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_whole(config, "num_key_value_heads", num_heads),
        head_dim=_whole(config, "head_dim", hidden_size // num_heads),
        ffn_size=_whole(config, "intermediate_size"),
        rope=read_rope(config),
        norm_eps=float(_number(config, "rms_norm_eps")),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_positions=positions,
    )


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a size of a config.json, or the default where it has none. Raises ValueError if it is not a positive whole number."""
    value = config.get(name)
    if value is None and default is not None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={str(value)[:40]!r} is not a positive whole number")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    """Returns a setting of a config.json. Raises ValueError if it is not a finite number, or negative."""
    value = config[name]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < LARGEST_NUMBER:
        raise ValueError(f"{name}={str(value)[:40]!r} is not a number from 0 on")
    return value


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Reads the settings of a config.json. Raises ValueError that names the setting if it is not supported."""
    # transformers 4 writes rope_theta and rope_scaling, transformers 5 writes one dict for both.
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ValueError(f"the rope settings {str(found)[:40]!r} are not a JSON object")
    given: dict[str, Any] = dict(found)
    given.setdefault("rope_type", given.get("type", "default"))
    given.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if given["rope_type"] not in ROPE_TYPES:
        raise ValueError(f"rope type {given['rope_type']!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    if not given.get("original_max_position_embeddings"):
        given["original_max_position_embeddings"] = int(config["max_position_embeddings"])
    known = {one.name for one in fields(Rope)}
    used = {name: value for name, value in given.items() if name in known and value is not None}
    numbers = {name: _number(used, name) for name in used.keys() - {"rope_type", "truncate"}}
    for name, least in _ROPE_ABOVE.items():
        if name in numbers and not numbers[name] > least:
            raise ValueError(f"{name}={numbers[name]} must be above {least}")
    return Rope(**{**used, **numbers, "truncate": used.get("truncate", True) is True})


def read_vocab_size(folder: Path, config: dict[str, Any]) -> int:
    """Returns the number of tokens of a config.json. Raises ValueError if it has none."""
    try:
        return _whole(config, "vocab_size")
    except ValueError as error:
        raise ValueError(f"{folder}/config.json: {error}") from None


def read_end_tokens(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end tokens of config.json and generation_config.json; chat models often name the end of a turn only there."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    for source in (config, read_json(generation) if generation.exists() else {}):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"{folder}: eos_token_id={str(token)[:40]!r} is not a token")
    return tuple(dict.fromkeys(found))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of a model folder."""
    if not path.exists():
        raise FileNotFoundError(
            f"no {path}; a model folder holds config.json, model.safetensors and a tokenizer"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value
