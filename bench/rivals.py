"""The other engines of bench/engine.py on the same prompts: transformers, twice, llama.cpp and vLLM."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file

from shoal.model.load_model import DTYPES
from shoal.model.shape import read_shape
from shoal.model.weights import WEIGHTS_FILE
from shoal.rollout.engine.api import GenerationRequest
from shoal.wire.run_spec import ProofSpec

T = TypeVar("T")


class Spent(NamedTuple):
    seconds: float
    cpu_seconds: float


class Lines(Protocol):
    rows: list[GenerationRequest]
    longest: int

    def rival(self, what: str, tokens: int, spent: Spent, notes: str) -> None: ...


def spend(device: str, work: Callable[[], T]) -> tuple[Spent, T]:
    if device == "cuda":
        torch.cuda.synchronize()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return Spent(time.perf_counter() - started_s, time.process_time() - cpu_s), result


def load_reference(options: argparse.Namespace, folder: Path, **more: str) -> Any:
    from transformers import AutoModelForCausalLM

    return (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[options.dtype], trust_remote_code=False, use_safetensors=True, **more
        )
        .to(options.device)
        .eval()
    )


def bench_generate(
    options: argparse.Namespace, folder: Path, requests: Sequence[GenerationRequest], table: Lines
) -> None:
    model = load_reference(options, folder)
    width = max(len(request.prompt_tokens) for request in requests)
    padding = [width - len(request.prompt_tokens) for request in requests]
    tokens = torch.tensor(
        [[0] * pad + list(request.prompt_tokens) for pad, request in zip(padding, requests, strict=True)]
    ).to(options.device)
    mask = (torch.arange(width)[None] >= torch.tensor(padding)[:, None]).long().to(options.device)

    def generate(num_new: int) -> None:
        model.generate(
            tokens,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
        )

    if options.device == "cuda":
        generate(2)
    spent, _ = spend(options.device, lambda: generate(options.baseline_tokens))
    table.rival(
        f"transformers generate, {len(requests)} rows",
        len(requests) * options.baseline_tokens,
        spent,
        f"{options.baseline_tokens} tokens a row, prefill included",
    )


def bench_continuous(
    options: argparse.Namespace, folder: Path, requests: Sequence[GenerationRequest], table: Lines
) -> None:
    from transformers import GenerationConfig

    model = load_reference(options, folder, attn_implementation="paged|sdpa")
    config = GenerationConfig(
        max_new_tokens=options.baseline_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    inputs = [list(request.prompt_tokens) for request in requests]
    model.generate_batch(inputs=inputs[:4], generation_config=config)
    spent, results = spend(
        options.device, lambda: model.generate_batch(inputs=inputs, generation_config=config)
    )
    tokens = sum(len(result.generated_tokens) for result in results.values())
    table.rival(
        f"transformers continuous batching, {len(inputs)} rows",
        tokens,
        spent,
        f"{tokens:,} tokens, paged SDPA",
    )


def bench_llama(
    options: argparse.Namespace, folder: Path, requests: Sequence[GenerationRequest], table: Lines
) -> None:
    """llama.cpp through llama-cpp-python's C interface: each prompt computed once for all its rows, as here. Tokens are the
    likeliest ones, so it is spared the drawing."""
    import llama_cpp

    silence = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silence, None)
    path = folder / f"{options.dtype}.gguf"
    write_gguf(folder, path, options.dtype)
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    settings = llama_cpp.llama_context_default_params()
    prompts = list(dict.fromkeys(request.prompt_tokens for request in requests))
    positions = sum(map(len, prompts)) + len(requests) * (options.baseline_tokens + 32)
    settings.n_ctx, settings.n_batch, settings.n_ubatch = -(-positions // 256) * 256, 2048, 512
    settings.n_seq_max, settings.n_threads = len(requests), torch.get_num_threads()
    settings.n_threads_batch = torch.get_num_threads()
    settings.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(2048, 0, 1)
    vocab = read_shape(folder).vocab_size

    def feed(items: Sequence[tuple[int, int, int, bool]]) -> None:
        """(token, position, row, whether logits are wanted)."""
        for at, (token, position, row, wanted) in enumerate(items):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = row, wanted
        batch.n_tokens = len(items)
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def likeliest(num: int) -> list[int]:
        """Returns the likeliest next token for each of the last `num` tokens whose logits were requested."""
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(num, vocab))
        tokens: list[int] = logits.argmax(1).tolist()
        return tokens

    def run() -> None:
        newest = [0] * len(requests)
        for prompt in prompts:
            rows = [row for row, request in enumerate(requests) if request.prompt_tokens == prompt]
            feed([(token, at, rows[0], at == len(prompt) - 1) for at, token in enumerate(prompt)])
            token = likeliest(1)[0]
            for row in rows:
                newest[row] = token
                if row != rows[0]:
                    llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(context), rows[0], row, -1, -1)
        for step in range(options.baseline_tokens - 1):
            feed(
                [
                    (newest[row], len(request.prompt_tokens) + step, row, True)
                    for row, request in enumerate(requests)
                ]
            )
            newest = likeliest(len(requests))

    passes = []
    for _ in range(options.repeats):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        passes.append(spend(options.device, run)[0])
    table.rival(
        f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {options.dtype}, {len(requests)} rows",
        len(requests) * options.baseline_tokens,
        min(passes),
        f"{options.baseline_tokens} tokens a row, prompts computed once, greedy",
    )


def bench_vllm(
    options: argparse.Namespace, folder: Path, requests: Sequence[GenerationRequest], table: Lines
) -> None:
    """vLLM behind our interface: it draws as we do, and proves what it has drawn."""
    from shoal.rollout.engine.vllm_engine import VllmEngine

    started_s = time.perf_counter()
    engine = VllmEngine(
        compute_dtype=options.dtype, proof=ProofSpec(), max_rows=options.rows, device=options.device
    )
    with contextlib.ExitStack() as stack:
        if options.device == "cuda":
            engine._options["gpu_memory_utilization"] = options.vllm_memory
        if options.no_file:
            stack.enter_context(_dummy_weights())
        engine.load(folder, 0)
    print(f"VllmEngine: start {time.perf_counter() - started_s:.1f} s", flush=True)
    rows = table.rows or _alike(options, requests)

    def run(rows: Sequence[GenerationRequest]) -> int:
        engine.submit(rows)
        tokens = 0
        while engine.has_work:
            tokens += sum(len(row.output_tokens) for row in engine.step())
        return tokens

    run([replace(request, max_new_tokens=4) for request in requests])
    passes = []
    for version in range(options.repeats):
        if options.no_file:
            engine._model().vllm.reset_prefix_cache()
        else:
            engine.load(folder, 1 + version)  # or it would remember the prompts of the pass before
        passes.append(spend(options.device, lambda: run(rows)))
    spent, tokens = min(passes)
    assert isinstance(tokens, int)
    table.rival(f"VllmEngine, {len(rows)} rows", tokens, spent, "prompts computed once, proofs on")


@contextlib.contextmanager
def _dummy_weights() -> Iterator[None]:
    """Has VllmEngine start with vLLM's random weights instead of a file's."""
    import vllm

    def arguments(**settings: Any) -> Any:
        return make(**settings | {"load_format": "dummy"})

    make = vllm.EngineArgs
    with mock.patch.object(vllm, "EngineArgs", arguments):
        yield


def _alike(options: argparse.Namespace, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    return [replace(request, max_new_tokens=options.baseline_tokens) for request in requests]


def bench_plain(
    options: argparse.Namespace, folder: Path, requests: Sequence[GenerationRequest], table: Lines
) -> None:
    """vLLM by itself: `LLM.generate`, as many tokens for each row as it may have, with the drawn tokens' log-probs."""
    from vllm import LLM, SamplingParams

    rows = table.rows or _alike(options, requests)
    started_s = time.perf_counter()
    engine = LLM(
        model=str(folder),
        dtype=options.dtype,
        max_num_seqs=options.rows,
        max_model_len=table.longest,
        gpu_memory_utilization=options.vllm_memory,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="dummy" if options.no_file else "safetensors",
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def run(rows: Sequence[GenerationRequest]) -> int:
        prompts = [{"prompt_token_ids": list(row.prompt_tokens)} for row in rows]
        sampling = [
            SamplingParams(
                temperature=row.temperature,
                max_tokens=row.max_new_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,  # the faster of vLLM's two forms
            )
            for row in rows
        ]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    run([replace(request, max_new_tokens=4) for request in rows[:64]])
    print(f"plain vLLM: start {time.perf_counter() - started_s:.1f} s", flush=True)
    passes = []
    for _ in range(options.repeats):
        engine.reset_prefix_cache()
        passes.append(spend(options.device, lambda: run(rows)))
    spent, tokens = min(passes)
    table.rival(f"plain vLLM, {len(rows)} rows", tokens, spent, "log-probs of the drawn tokens, no proofs")


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """The model folder as a GGUF file without a tokenizer."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / WEIGHTS_FILE).items():
        parts = name.split(".")
        if parts[-2] in heads:  # llama.cpp rotates neighbours, not halves
            rows = tensor.view(heads[parts[-2]], 2, -1, tensor.shape[1])
            tensor = rows.transpose(1, 2).reshape(tensor.shape)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None, f"gguf has no name for {name}"
        if tensor.dim() == 1 or dtype == "float32":
            writer.add_tensor(target, tensor.float().numpy())
        else:
            words = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, words, raw_shape=words.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
