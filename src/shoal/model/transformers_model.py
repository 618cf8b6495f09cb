"""Any causal language model of transformers, with the interface of Decoder: for training, generating and checking.

Samples are packed by restarting position ids, which transformers turns into a block mask for most architectures. A test with the
loaded weights shows whether this one does. Where packed samples influence each other (recurrent states, ALiBi), each sample gets
a row of its own: the states are the same, with more padding.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.files import is_out_of_memory
from shoal.model.logprobs import LogitHead

_PROBE_TOKENS = 7
_TOLERANCE = 1e-3
_CACHE_TOLERANCE = 0.3
"""In bfloat16 the states of small random models differ by at most 0.05 of their norm, and those of a wrong cache by 0.85."""
_CACHES = ("past_key_values", "cache_params")
"""Names under which families take and return what they keep of the tokens so far."""
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Settings of families whose logits have a soft cap: Gemma, RecurrentGemma."""
UNLIMITED_POSITIONS = 1 << 20
"""Positions of a family without a limit of its own, such as a recurrent one."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The sizes of a model that engines and validators need; Shape has them too."""

    hidden_size: int
    vocab_size: int
    max_positions: int


class TransformersModel(nn.Module):
    """A model of transformers. `forward` returns the states before the head; parameters keep their names.

    Learned values that transformers keep as persistent buffers, such as the expert biases of DeepSeek-V3, become parameters
    without a gradient, so that they are saved, sent and loaded like all other weights.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        for module in lm.modules():
            for name, buffer in list(module._buffers.items()):
                kept = name not in module._non_persistent_buffers_set
                if buffer is not None and kept and buffer.is_floating_point():
                    del module._buffers[name]
                    module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
        # Registered part by part, so that parameter names get no prefix. Not by add_module, which refuses names that this class has,
        # such as RWKV's `head`.
        for name, module in lm.named_children():
            self._modules[name] = module
        self._lm = (lm,)  # in a tuple: as an attribute it would be registered a second time
        self.config = lm.config
        self.packs = True
        """Whether packed samples do not influence each other; set by check_head_and_packing."""
        self.caches = True
        """Whether the family's cache gives the states of whole rows, about; set by check_head_and_packing."""

    @property
    def shape(self) -> ModelLimits:
        """The sizes of the model."""
        return _limits(self.config)

    @property
    def trunk(self) -> Any:
        """The model without its head."""
        return self._lm[0].base_model

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, *, segments_BT: Tensor | None = None
    ) -> Tensor:
        """Returns the states before the head, [B, T, H]. Like Decoder.forward, without a cache."""
        if segments_BT is None:
            return self._states(tokens_BT, None)
        if self.packs:
            # Position ids restart only at the start of a sample; padding is counted separately.
            padding_BT = segments_BT < 0
            return self._states(tokens_BT, torch.where(padding_BT, padding_BT.cumsum(1) - 1, positions_BT))
        return self._states_by_sample(tokens_BT, segments_BT)

    def head(self) -> LogitHead:
        """Returns what turns states into logits, with the scale and soft cap that this family uses."""
        last = self._lm[0].get_output_embeddings()
        scale = 1.0
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            scale = 1.0 / float(divisor)
        elif (factor := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            scale = float(factor)
        return LogitHead(
            weight_VH=last.weight,
            bias_V=getattr(last, "bias", None),
            scale=scale,
            softcap=next((found for name in _SOFTCAPS if (found := getattr(self.config, name, None))), None),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits, [..., V], of states [..., H]."""
        return self.head().logits(hidden)

    def blocks(self) -> list[nn.Module]:
        """Returns the modules of the longest ModuleList, which are the layers in all architectures seen so far."""
        lists = [list(module) for module in self.trunk.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def _states(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        answer = self.trunk(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
        states: Tensor = answer.last_hidden_state
        return states

    def _states_by_sample(self, tokens_BT: Tensor, segments_BT: Tensor) -> Tensor:
        """Computes each sample in a row of its own, padded on the right, which a causal model does not attend to."""
        spans = [
            (row, a, b)
            for row in range(len(segments_BT))
            for a, b in _segment_spans(segments_BT[row].tolist())
        ]
        width = max(b - a for _, a, b in spans)
        alone = torch.stack([F.pad(tokens_BT[row, a:b], (0, width - (b - a))) for row, a, b in spans])
        states = self._states(alone, None)
        flat = torch.cat([states[index, : b - a] for index, (_, a, b) in enumerate(spans)])
        return flat.view(*tokens_BT.shape, -1)


class CachedRows:
    """Rows that are fed piece by piece, as in generation. All rows have the same number of tokens."""

    def __init__(self, model: TransformersModel) -> None:
        self._model = model
        self._fed_BT: Tensor | None = None
        self._cache: dict[str, Any] = {}

    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Appends tokens to the rows and returns their states, [B, T, H]."""
        fed_BT = tokens_BT if self._fed_BT is None else torch.cat((self._fed_BT, tokens_BT), dim=1)
        self._fed_BT = fed_BT
        # A family without a cache computes the whole row again.
        answer = self._model.trunk(
            input_ids=tokens_BT if self._cache else fed_BT, use_cache=self._model.caches, **self._cache
        )
        if self._model.caches:
            self._cache = {
                name: kept for name in _CACHES if (kept := getattr(answer, name, None)) is not None
            }
        states: Tensor = answer.last_hidden_state[:, -tokens_BT.shape[1] :]
        return states

    def select(self, rows_B: Tensor) -> None:
        """Keeps these rows only."""
        assert self._fed_BT is not None, "nothing was fed"
        self._fed_BT = self._fed_BT[rows_B]
        if not all(_keep_rows(cache, rows_B) for cache in self._cache.values()):
            self._cache = {}  # the next call computes the rows again


def _keep_rows(cache: Any, rows_B: Tensor) -> bool:
    """Removes all other rows from a cache of transformers. Returns whether it could; if not, the cache must not be used."""
    try:
        # `batch_select_indices` leaves out the states of linear attention.
        if any(hasattr(layer, "recurrent_states") for layer in getattr(cache, "layers", ())):
            cache.reorder_cache(rows_B)
        else:
            cache.batch_select_indices(rows_B)
    except (AttributeError, IndexError):  # families with a cache of their own that lacks it, or fails in it
        return False
    return True


def empty_transformers_model(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device | str
) -> TransformersModel:
    """Returns a model of this config.json with random parameters; its buffers, such as rotation tables, are complete."""
    from transformers import AutoModelForCausalLM

    try:
        settings = _read_config(config)
        lm: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"config.json: transformers has no causal language model of model_type={config.get('model_type')!r}: {error}"
        ) from None
    return TransformersModel(lm.to(device).eval())  # dropout would make two passes over a sample differ


def read_limits(config: dict[str, Any]) -> ModelLimits:
    """Returns the sizes of a model of this config.json, without creating it."""
    return _limits(_read_config(config))


def _read_config(config: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    # From a file, because from_pretrained also reads values that JSON lacks, such as infinity.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (TypeError, AttributeError, IndexError, ArithmeticError, StrictDataclassError) as error:
            raise ValueError(f"config.json: {str(error)[:300]}") from None


def _limits(config: Any) -> ModelLimits:
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    return ModelLimits(text.hidden_size, text.vocab_size, positions or UNLIMITED_POSITIONS)


def check_head_and_packing(model: TransformersModel, folder: Path) -> None:
    """Runs a few tokens: raises ValueError if LogitHead gives other logits, and sets `packs` and `caches` to whether these work."""
    weight = model.head().weight_VH
    tokens_BT = (torch.arange(2 * _PROBE_TOKENS, device=weight.device) * 7 + 3)[None] % weight.shape[0]
    half = torch.arange(_PROBE_TOKENS, device=weight.device)
    positions_BT = torch.cat((half, half))[None]
    segments_BT = torch.cat((half * 0, half * 0 + 1))[None]
    with torch.no_grad():
        alone = torch.cat(
            [model._states(part, None) for part in torch.split(tokens_BT, _PROBE_TOKENS, dim=1)], dim=1
        )
        whole = model._lm[0](input_ids=tokens_BT[:, :_PROBE_TOKENS], use_cache=False).logits
        ours = model.logits(alone[:, :_PROBE_TOKENS])
        if not _close(ours, whole):
            raise ValueError(
                f"{folder}: {model.config.model_type!r} computes logits from states in an unsupported way; "
                "supported: a matrix, a bias, a scale and a soft cap (LogitHead in model/logprobs.py)"
            )
        try:
            model.packs = _close(model(tokens_BT, positions_BT, segments_BT=segments_BT), alone)
        except TypeError:  # the architecture takes no position ids
            model.packs = False
        model.caches = _caches(model, tokens_BT[:, :_PROBE_TOKENS], alone[:, :_PROBE_TOKENS])


def _caches(model: TransformersModel, tokens_BT: Tensor, states_BTH: Tensor) -> bool:
    """Returns whether tokens that are fed one by one have these states; MiniMax's cache gives others in transformers 5.22."""
    fed = CachedRows(model)
    try:
        found_BTH = torch.cat([fed.feed(token_B1) for token_B1 in torch.split(tokens_BT, 1, dim=1)], dim=1)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return False
    return bool((found_BTH - states_BTH).float().norm() <= _CACHE_TOLERANCE * states_BTH.float().norm())


def _close(left: Tensor, right: Tensor) -> bool:
    left, right = left.float(), right.float()
    return bool((left - right).norm() <= _TOLERANCE * right.norm())


def _segment_spans(ids: list[int]) -> list[tuple[int, int]]:
    starts = [index for index, one in enumerate(ids) if index == 0 or ids[index - 1] != one]
    return list(zip(starts, [*starts[1:], len(ids)], strict=True))
