"""Every family, from a folder to a verdict: copied, trained one step, generated with proofs, and checked by a validator.

Sizes are small and weights random. Each folder is written by transformers as its authors would publish it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from honest_work import make_claim, make_lease, make_spec

from shoal.model.builtin import ALPHABET, create_model
from shoal.model.load_model import load_causal
from shoal.model.tokenizer import CharTokenizer, load_tokenizer
from shoal.rollout.adversary.lies import make_behaviour
from shoal.rollout.engine.api import Behaviour, FinishedRow, make_requests, make_table
from shoal.rollout.engine.selection import make_engine
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease
from shoal.wire.rollouts import encode

VOCAB = 3 + len(ALPHABET)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GQA: dict[str, Any] = {"num_key_value_heads": 2}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
}
EXPERTS: dict[str, Any] = GQA | {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
ROPE: dict[str, Any] = {"rope_theta": 1e4, "factor": 4.0}

FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GQA | {"tie_word_embeddings": False}),
    "llama-tied": ("llama", GQA | {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", GQA | {"head_dim": 48}),
    "llama-theta": ("llama", GQA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-attention-bias": ("llama", GQA | {"attention_bias": True}),
    "llama-mlp-bias": ("llama", GQA | {"mlp_bias": True}),
    "llama-gelu": ("llama", GQA | {"hidden_act": "gelu"}),
    "llama-linear": ("llama", GQA | {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    "llama-dynamic": ("llama", GQA | {"rope_parameters": {"rope_type": "dynamic", **ROPE}}),
    "llama-yarn": (
        "llama",
        GQA | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32, **ROPE}},
    ),
    "llama-3.1": (
        "llama",
        GQA
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                **ROPE,
            }
        },
    ),
    "qwen2": ("qwen2", GQA | {"tie_word_embeddings": False}),
    "qwen2-tied": ("qwen2", GQA | {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        GQA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2-yarn": (
        "qwen2",
        GQA | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32, **ROPE}},
    ),
    "qwen3": ("qwen3", GQA | {"head_dim": 48}),
    "qwen3-attention-bias": ("qwen3", GQA | {"head_dim": 32, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        GQA | {"head_dim": 32, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "mistral": ("mistral", GQA | {"sliding_window": None}),
    "mistral-window": ("mistral", GQA | {"sliding_window": 8}),
    "mixtral": ("mixtral", GQA | {"num_local_experts": 4}),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"head_dim": 32, "num_experts": 4}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64}),
    "gemma": ("gemma", GQA | {"head_dim": 32}),
    "gemma2": ("gemma2", GQA | {"head_dim": 32, "sliding_window": 8}),
    "gemma3": ("gemma3_text", GQA | {"head_dim": 32, "sliding_window": 8}),
    "phi": ("phi", GQA),
    "phi3": ("phi3", GQA),
    "gpt2": ("gpt2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "olmo": ("olmo", GQA),
    "olmo2": ("olmo2", GQA),
    "olmoe": ("olmoe", GQA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("smollm3", GQA),
    "granite": ("granite", GQA | {"logits_scaling": 3.0, "residual_multiplier": 0.7}),
    "cohere": ("cohere", GQA),
    "glm4": ("glm4", GQA | {"head_dim": 32}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "lfm2": ("lfm2", GQA),
    "starcoder2": ("starcoder2", GQA),
    "stablelm": ("stablelm", GQA),
    "falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "gpt-oss": (
        "gpt_oss",
        EXPERTS
        | {
            "num_local_experts": 4,
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 128}),
    "nemotron": ("nemotron", GQA),
    "exaone4": ("exaone4", GQA | {"sliding_window": 8, "sliding_window_pattern": 2}),
    "nanochat": ("nanochat", GQA),
    "qwen3-next": (
        "qwen3_next",
        EXPERTS
        | {
            "num_experts": 4,
            "head_dim": 32,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        GQA
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
    "jamba": (
        "jamba",
        EXPERTS
        | {
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_dt_rank": 8,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        GQA | {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16},
    ),
    "minimax": (
        "minimax",
        EXPERTS
        | {
            "num_local_experts": 4,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 16,
        },
    ),
    "recurrent-gemma": (
        "recurrent_gemma",
        {
            "num_key_value_heads": 1,
            "lru_width": 128,
            "attention_window_size": 32,
            "head_dim": 32,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "rwkv": ("rwkv", {"attention_hidden_size": 128, "context_length": 128}),
    "glm4-moe": (
        "glm4_moe",
        EXPERTS | {"n_routed_experts": 4, "head_dim": 32, "first_k_dense_replace": 1, "n_group": 1},
    ),
}
STORED: dict[str, tuple[str, torch.dtype, str]] = {
    "llama-float16": ("llama", torch.float16, "1GB"),
    "llama-bfloat16": ("llama", torch.bfloat16, "1GB"),
    "llama-in-shards": ("llama", torch.float32, "60KB"),
    "qwen2-float16-in-shards": ("qwen2", torch.float16, "40KB"),
    "qwen3-bfloat16-in-shards": ("qwen3", torch.bfloat16, "40KB"),
    "mixtral-bfloat16-in-shards": ("mixtral", torch.bfloat16, "100KB"),
}
"""Folders of these shapes in other dtypes, or in files of at most this size."""
IN_DEFAULT_TESTS = ("llama-3.1", "gemma2", "deepseek-v3", "qwen3-next", "minimax", "rwkv")
"""The others take a second each and run with `make integration`."""

SPEC = make_spec()
LEASE = make_lease(SPEC, prompts=2)


def cases() -> Iterator[Any]:
    for name in (*FOLDERS, *STORED):
        marks = () if name in IN_DEFAULT_TESTS else (pytest.mark.integration,)
        yield pytest.param(name, marks=marks)


def publish(name: str, folder: Path, *, seed: int = 3) -> Path:
    """Writes a random model as transformers does, with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    shape, dtype, shard_size = STORED.get(name, (name, torch.float32, "1GB"))
    kind, settings = FOLDERS[shape]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | settings))).to(dtype)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    model.save_pretrained(folder, max_shard_size=shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == name.endswith("shards")
    CharTokenizer(ALPHABET).save(folder)
    return folder


def generate(folder: Path, lease: Lease, behaviour: Behaviour | None = None) -> list[FinishedRow]:
    behaviour = behaviour or Behaviour()
    engine = behaviour.engine(
        make_engine("torch", compute_dtype="float32", proof=lease.proof, max_rows=8, device="cpu")
    )
    engine.load(folder, 0)
    engine.submit(behaviour.requests(make_requests(lease, engine.tokenizer), lease))
    rows: list[FinishedRow] = []
    while engine.has_work:
        rows += engine.step()
    return sorted(rows, key=lambda row: (row.request.prompt_index, row.request.sample_index))


@pytest.mark.parametrize("name", list(cases()))
def test_a_folder_is_trained_generated_proven_and_checked(
    name: str, tmp_path: Path, reader: TableReader
) -> None:
    create_model(str(publish(name, tmp_path / "theirs")), tmp_path / "v0", seed=0)
    create_model(str(publish(name, tmp_path / "others", seed=4)), tmp_path / "other", seed=0)
    model = load_causal(tmp_path / "v0")
    tokens_BT = torch.arange(12)[None] % VOCAB
    loss = model.logits(model(tokens_BT, torch.arange(12)[None])).float().log_softmax(-1)[..., 3].sum()
    loss.backward()
    assert any(one.grad is not None and one.grad.abs().sum() > 0 for one in model.parameters())
    assert {name for name, one in model.named_parameters() if one.requires_grad} >= {
        name for name, one in model.named_parameters() if one.grad is not None
    }

    tokenizer = load_tokenizer(tmp_path / "v0")
    rows = generate(tmp_path / "v0", LEASE)
    data = encode(make_table(LEASE, 0, rows))
    policy = LoadedPolicy(0, load_causal(tmp_path / "v0"), tokenizer)
    honest = judge(data, make_claim(LEASE, data), SPEC, policy, reader=reader, control_seed=1)
    assert honest.code == ACCEPTED, honest

    lie = encode(make_table(LEASE, 0, generate(tmp_path / "other", LEASE)))
    caught = judge(lie, make_claim(LEASE, lie), SPEC, policy, reader=reader, control_seed=1)
    assert caught.code.startswith("reject."), caught


def test_the_docs_name_every_folder() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    assert len(FOLDERS) + len(STORED) >= 47
    assert [name for name in (*FOLDERS, *STORED) if f"`{name}`" not in page] == []


def test_learned_buffers_are_weights(tmp_path: Path) -> None:
    """DeepSeek-V3 chooses experts by a bias that transformers keeps as a buffer."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        publish("deepseek-v3", tmp_path / "theirs"), dtype=torch.bfloat16
    ).float()
    create_model(str(tmp_path / "theirs"), tmp_path / "v0", seed=0)
    tokens_BT = torch.arange(12)[None] % VOCAB
    with torch.no_grad():
        model = load_causal(tmp_path / "v0")
        ours = model.logits(model(tokens_BT, torch.arange(12)[None]))
        torch.testing.assert_close(ours, theirs.eval()(tokens_BT).logits, rtol=1e-3, atol=1e-3)
    assert not [one for one in model.state_dict() if one in dict(model.named_buffers())]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "lie"),
    [
        ("gemma2", "wrong-weights"),
        ("gemma2", "int4-weights"),
        ("gemma2", "typical-proof"),
        ("mixtral", "wrong-weights"),
        ("mixtral", "int4-weights"),
        ("mixtral", "typical-proof"),
        ("mixtral", "smaller-model"),
    ],
)
def test_lies_are_told_and_refused_in_families_that_go_through_transformers(
    name: str, lie: str, tmp_path: Path, reader: TableReader
) -> None:
    create_model(str(publish(name, tmp_path / "theirs")), tmp_path / "v0", seed=0)
    rows = generate(tmp_path / "v0", LEASE, make_behaviour(lie, "http://127.0.0.1:1"))
    data = encode(make_table(LEASE, 0, rows))
    policy = LoadedPolicy(0, load_causal(tmp_path / "v0"), load_tokenizer(tmp_path / "v0"))
    verdict = judge(data, make_claim(LEASE, data), SPEC, policy, reader=reader, control_seed=1)
    assert verdict.code.startswith("reject."), verdict.detail
