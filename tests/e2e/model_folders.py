"""Writes model folders for runs of hostile operators and of policies that have learned to cheat."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"
SURE = 25.0
"""A logit that leaves the other tokens a probability of about 1e-9."""


def write_model(
    folder: Path, answers: Sequence[str] = (), *, positions: int = 256, template: str | None = None
) -> None:
    """Writes a small random model. With `answers` it gives one of them to every prompt, each as often as the others.

    An answer is a single token, so that nothing has to be trained.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={one: index for index, one in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END])
    raw.add_tokens([AddedToken(answer, normalized=False) for answer in answers])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END).save_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    config = LlamaConfig(
        vocab_size=raw.get_vocab_size(),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        eos_token_id=raw.token_to_id(END),
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if answers:
        ids = raw.get_vocab()
        _make_sure(model, [ids[answer] for answer in answers], ids[END])
    model.save_pretrained(folder)


@torch.no_grad()
def _make_sure(model: LlamaForCausalLM, answers: list[int], end: int) -> None:
    """Makes the next token one of `answers`, and after one of those `end`. The first two channels of the states decide it."""
    embedding_VH, head_VH = model.model.embed_tokens.weight, model.lm_head.weight
    width = embedding_VH.shape[1]
    large = 10 * math.sqrt(width) * embedding_VH.std()
    embedding_VH[:, 0], embedding_VH[:, 1] = large, 0.0
    embedding_VH[answers, 0], embedding_VH[answers, 1] = 0.0, large
    head_VH[:, :2] = 0.0
    head_VH[answers, 0] = head_VH[end, 1] = SURE / math.sqrt(width)
