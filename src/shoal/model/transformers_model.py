"""Any causal language model that transformers knows, with the same face as our Decoder. For training only.

Rows are packed by restarting position ids, which transformers turns into a block mask for the architectures that know
how. Whether this one does is tried when it is loaded, on its own weights; where packed samples feel their neighbours
(recurrent states, ALiBi), samples are laid out one a row instead. The states are the same, the padding is not.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.head import Head

_PROBE_TOKENS = 7
_TOLERANCE = 1e-3


class Foreign(nn.Module):
    """`forward` gives the states that the head takes; names of parameters are transformers' own."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        # Registered part by part under its own names, so that a parameter's name has no prefix of ours.
        for name, module in lm.named_children():
            self.add_module(name, module)
        self._lm = (lm,)  # in a tuple: a module attribute would register it, and every name, once more
        self.config = lm.config
        self.packs = True

    @property
    def trunk(self) -> Any:
        return self._lm[0].base_model

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, *, segments_BT: Tensor | None = None
    ) -> Tensor:
        """States before the head, [B, T, H]; as Decoder.forward, without a cache."""
        if segments_BT is None:
            return self._states(tokens_BT, None)
        if self.packs:
            return self._states(tokens_BT, _restarting(positions_BT, segments_BT))
        return self._one_a_row(tokens_BT, segments_BT)

    def head(self) -> Head:
        last = self._lm[0].get_output_embeddings()
        scale = 1.0
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            scale = 1.0 / float(divisor)
        elif (factor := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            scale = float(factor)
        return Head(
            weight_VH=last.weight,
            bias_V=getattr(last, "bias", None),
            scale=scale,
            softcap=getattr(self.config, "final_logit_softcapping", None),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head().logits(hidden)

    def blocks(self) -> list[nn.Module]:
        """The modules of the longest list: the layers of every architecture so far."""
        lists = [list(module) for module in self.trunk.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def _states(self, tokens_BT: Tensor, positions_BT: Tensor | None) -> Tensor:
        answer = self.trunk(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
        states: Tensor = answer.last_hidden_state
        return states

    def _one_a_row(self, tokens_BT: Tensor, segments_BT: Tensor) -> Tensor:
        """Each sample in a row of its own, padded on the right, where a causal model cannot look."""
        spans = [(row, a, b) for row in range(len(segments_BT)) for a, b in _runs(segments_BT[row].tolist())]
        width = max(b - a for _, a, b in spans)
        alone = torch.stack([F.pad(tokens_BT[row, a:b], (0, width - (b - a))) for row, a, b in spans])
        states = self._states(alone, None)
        flat = torch.cat([states[index, : b - a] for index, (_, a, b) in enumerate(spans)])
        return flat.view(*tokens_BT.shape, -1)


def empty_foreign(config: dict[str, Any], dtype: torch.dtype, device: torch.device | str) -> Foreign:
    """A model of this config.json. Its parameters are drawn at random, its tables (of rotations, say) are right."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = dict(config)
    try:
        settings = AutoConfig.for_model(kind.pop("model_type"), **kind)
        lm: Any = AutoModelForCausalLM.from_config(settings, dtype=dtype)  # type: ignore[no-untyped-call]
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"config.json: transformers has no causal language model of model_type={config.get('model_type')!r}: {error}"
        ) from None
    return Foreign(lm.to(device).eval())  # eval: dropout would make two passes over one sample disagree


def probe(model: Foreign, folder: Path) -> None:
    """Try the head and the packing on a few tokens: refuse a head that is not a Head, unpack where packing leaks."""
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
                f"{folder}: {model.config.model_type!r} turns states into logits in a way that is not known here; "
                "what is known: a matrix, a bias, a scale, a soft cap (model/head.py)"
            )
        model.packs = _packs(model, tokens_BT, positions_BT, segments_BT, alone)


def _packs(
    model: Foreign, tokens_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor, alone: Tensor
) -> bool:
    try:
        return _close(model(tokens_BT, positions_BT, segments_BT=segments_BT), alone)
    except TypeError:  # this architecture takes no position ids
        return False


def _close(left: Tensor, right: Tensor) -> bool:
    left, right = left.float(), right.float()
    return bool((left - right).norm() <= _TOLERANCE * right.norm())


def _restarting(positions_BT: Tensor, segments_BT: Tensor) -> Tensor:
    """Position ids whose every break is the start of a sample. Padding counts on for itself."""
    padding_BT = segments_BT < 0
    count_BT = padding_BT.cumsum(1) - 1
    return torch.where(padding_BT, count_BT, positions_BT)


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    starts = [index for index, one in enumerate(ids) if index == 0 or ids[index - 1] != one]
    return list(zip(starts, [*starts[1:], len(ids)], strict=True))
