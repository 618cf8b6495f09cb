"""What scores packed rows: the model itself, a bfloat16 copy of it, or its shards on many ranks.

    exact     float32 weights compute; what CPUs and tests use
    copy      one device: a bfloat16 copy computes, its gradients are added up in float32 on the master weights
    sharded   FSDP2: every rank holds a part of the master weights, layers are gathered in bfloat16 (or float32) as they
              are needed, gradients are added up over the ranks in float32

The master weights are the given model's parameters in all three, under the same names.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.model.decoder import Decoder, RMSNorm
from shoal.model.load_model import DTYPES
from shoal.model.logprobs import TokenScores, token_scores
from shoal.model.transformers_model import Foreign
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.pack import MicroBatch
from shoal.trainer.distributed.ranks import Ranks

Causal = Decoder | Foreign

# Attention is most of a long row's work and little of its memory: its results are kept, all else is computed again.
_KEPT = {
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def score(model: Causal, micro: MicroBatch, temperature: float) -> TokenScores:
    """Log-prob and entropy of every output token of a micro-batch, with gradient."""
    hidden_BTH = model(micro.tokens_BT, micro.positions_BT, segments_BT=micro.segments_BT)
    hidden_NH = hidden_BTH.flatten(0, 1)[micro.predictors_N]
    return token_scores(model, hidden_NH, micro.targets_N, temperature=temperature)


class Scorer(nn.Module):
    """`score` as a module: what FSDP2 gathers before its forward is there for head and embedding alike."""

    def __init__(self, model: Causal) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro: MicroBatch, temperature: float) -> TokenScores:
        return score(self.model, micro, temperature)


class Policy:
    """Scores with the weights of `master` as they are now."""

    def __init__(self, master: Causal, config: TrainerConfig, ranks: Ranks) -> None:
        dtype = DTYPES[config.compute_dtype]
        self._copy = None
        if ranks.size == 1 and dtype != torch.float32:
            self._copy = WorkingCopy(master, dtype)
        computing = master if self._copy is None else self._copy.model
        for module in computing.modules():
            if isinstance(module, RMSNorm):
                module.fused = dtype != torch.float32
        for block in computing.blocks():
            _adapt(block, config)
        self._scorer = Scorer(computing)
        if ranks.size > 1:
            shard(self._scorer, computing.blocks(), dtype, ranks)

    def scores(self, micro: MicroBatch, temperature: float) -> TokenScores:
        if self._copy is not None:
            self._copy.refresh()
        result: TokenScores = self._scorer(micro, temperature)
        return result

    def reread(self) -> None:
        """Let go of what is gathered of the master weights on this device: somebody is about to write to them."""
        from torch.distributed.fsdp import FSDPModule

        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class WorkingCopy:
    """A copy in another dtype. Its gradients go to the master's as soon as each is complete."""

    def __init__(self, master: Causal, dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(master)
        for parameter in self.model.parameters():
            # Not model.to(dtype): that would round tables too, and a rotation by a rounded frequency is another rotation.
            parameter.data = parameter.data.to(dtype)
        self._masters = list(master.parameters())
        self._copies = list(self.model.parameters())
        self._seen = -1
        for one, of in zip(self._copies, self._masters, strict=True):
            if one.requires_grad:
                one.register_post_accumulate_grad_hook(partial(_hand_over, of))  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        """Take over the master's weights if anything has written to them since the last time."""
        seen = sum(parameter._version for parameter in self._masters)
        if seen != self._seen:
            with torch.no_grad():
                torch._foreach_copy_([one.data for one in self._copies], [one.data for one in self._masters])
            self._seen = seen


def _hand_over(master: Tensor, one: Tensor) -> None:
    gradient, one.grad = one.grad, None
    assert gradient is not None, "called when the gradient is complete"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient


def shard(scorer: Scorer, blocks: list[nn.Module], dtype: torch.dtype, ranks: Ranks) -> None:
    """Cut every parameter over the ranks, in place; each block is gathered and let go on its own."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    assert ranks.mesh is not None, "more than one rank has a mesh"
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=ranks.mesh, mp_policy=precision)
    # The root holds embedding, norm and head, which the backward pass needs at once: kept after the forward.
    fully_shard(scorer, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # A micro-batch's loss is its share of the batch's, so gradients add up: no mean over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _adapt(block: nn.Module, config: TrainerConfig) -> None:
    """Compile a block, and compute it again in the backward pass, as asked. Its parameters and names stay."""
    forward: Callable[..., Any] = block.forward
    if config.compile:
        forward = torch.compile(forward)
    if config.activation_checkpointing:
        # A compiled block is one piece: there is nothing inside it to keep.
        keep = partial(create_selective_checkpoint_contexts, _keep)
        again = partial(checkpoint, forward, use_reentrant=False)
        forward = again if config.compile else partial(again, context_fn=keep)
    block.forward = forward


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
