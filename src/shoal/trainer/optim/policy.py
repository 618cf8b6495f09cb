"""Computes log-probs of packed rows with the master weights, in one of three ways; and low-rank adapters.

    exact     the float32 weights compute; used on CPUs and in tests
    copy      one device: a bfloat16 copy computes, and its gradients are added in float32 to the master weights'
    sharded   FSDP2: every rank holds a shard of the master weights; layers are gathered in `compute_dtype` when needed,
              and gradients are summed over the ranks in float32

In all three the master weights are the given model's parameters, under the same names.

Adapters (peft) train two thin matrices beside every linear layer. What is published has W's own name, so that workers,
relays and validators need not know about adapters:

    y = x W' + (alpha / rank) x A' B'         trained, with W frozen
    W + (alpha / rank) B A                    published, with A and B rounded to 16 bits
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.diloco.ranks import Ranks
from shoal.model.decoder import MLP, Attention, Decoder, RMSNorm
from shoal.model.load_model import DTYPES
from shoal.model.logprobs import TokenScores, token_scores
from shoal.model.transformers_model import TransformersModel
from shoal.shardcast.adapter_delta import LEVELS, AdapterMatrices
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.pack import MicroBatch

Causal = Decoder | TransformersModel

# Attention takes most of a long row's time and little of its memory: its results are kept, the rest is recomputed.
_KEPT = {
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
_NAME = "default"
"""peft's name of the adapters."""
_A, _B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"


def score(model: Causal, micro: MicroBatch, *, entropy_gradient: bool = True) -> TokenScores:
    """Returns log-prob and entropy of every output token of a micro-batch at its temperature, with gradient."""
    scores = partial(token_scores, model, entropy_gradient=entropy_gradient)
    hidden_BTH = model(micro.tokens_BT, micro.positions_BT, segments_BT=micro.segments_BT)
    hidden_NH = hidden_BTH.flatten(0, 1)[micro.predictors_N]
    if len(micro.by_temperature) == 1:
        ((temperature, _),) = micro.by_temperature
        return scores(hidden_NH, micro.targets_N, temperature=temperature)
    parts = [
        scores(hidden_NH[places], micro.targets_N[places], temperature=temperature)
        for temperature, places in micro.by_temperature
    ]
    order = torch.cat([places for _, places in micro.by_temperature]).argsort()
    return TokenScores(*(torch.cat(part)[order] for part in zip(*parts, strict=True)))


class Scorer(nn.Module):
    """`score` as a module, so that FSDP2 gathers head and embedding before its forward."""

    def __init__(self, model: Causal, *, entropy_gradient: bool) -> None:
        super().__init__()
        self.model, self.entropy_gradient = model, entropy_gradient

    def forward(self, micro: MicroBatch) -> TokenScores:
        return score(self.model, micro, entropy_gradient=self.entropy_gradient)


class TrainerPolicy:
    """Computes log-probs with the current weights of `master`."""

    def __init__(self, master: Causal, config: TrainerConfig, ranks: Ranks) -> None:
        dtype = DTYPES[config.compute_dtype]
        self._copy = None
        if ranks.mesh is None and dtype != torch.float32:
            self._copy = WorkingCopy(master, dtype)
        computing = master if self._copy is None else self._copy.model
        for module in computing.modules():
            if isinstance(module, RMSNorm | MLP | Attention):
                module.fused = dtype != torch.float32
        if config.lora_rank and dtype != torch.float32:
            fuse_adapters(computing)
        for block in computing.blocks():
            _adapt(block, config)
        self._scorer = Scorer(computing, entropy_gradient=config.entropy_bonus > 0)
        if ranks.mesh is not None:
            shard(self._scorer, computing.blocks(), dtype, ranks)

    def scores(self, micro: MicroBatch) -> TokenScores:
        """Returns log-prob and entropy of every output token, with gradient to the master weights."""
        if self._copy is not None:
            self._copy.refresh()
        result: TokenScores = self._scorer(micro)
        return result

    def reshard(self) -> None:
        """Frees gathered weights. Call it before writing to the master weights, or old gathered values would be used."""
        from torch.distributed.fsdp import FSDPModule

        for module in self._scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class WorkingCopy:
    """A copy of the model in another dtype. Each of its gradients moves to the master weight as soon as it is complete.

    Frozen weights are not copied: both models have the same ones, in the copy's dtype.
    """

    def __init__(self, master: Causal, dtype: torch.dtype) -> None:
        for parameter in master.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        shared = {id(one): one for one in master.parameters() if not one.requires_grad}
        self.model = copy.deepcopy(master, shared)
        self._masters = [one for one in master.parameters() if one.requires_grad]
        self._copies = [one for one in self.model.parameters() if one.requires_grad]
        self._seen = -1
        for one, of in zip(self._copies, self._masters, strict=True):
            # Not model.to(dtype): that would also round the buffers, and rounded rotary frequencies change the model.
            one.data = one.data.to(dtype)
            one.register_post_accumulate_grad_hook(partial(_move_gradient, of))

    def refresh(self) -> None:
        """Copies the master weights if anything has written to them since the last call."""
        seen = sum(parameter._version for parameter in self._masters)
        if seen != self._seen:
            with torch.no_grad():
                torch._foreach_copy_([one.data for one in self._copies], [one.data for one in self._masters])
            self._seen = seen


def _move_gradient(master: Tensor, one: Tensor) -> None:
    gradient, one.grad = one.grad, None
    assert gradient is not None, "the hook runs when the gradient is complete"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient


def shard(scorer: Scorer, blocks: list[nn.Module], dtype: torch.dtype, ranks: Ranks) -> None:
    """Shards every parameter over the ranks, in place. Each block is gathered and freed on its own."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    assert ranks.mesh is not None, "a policy without a mesh is not sharded"
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=ranks.mesh, mp_policy=precision)
    # The root holds embedding, norm and head, which the backward pass needs first: they stay gathered after the forward.
    fully_shard(scorer, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # Each rank's loss is its share of the whole loss, so gradients are summed, not averaged over ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _adapt(block: nn.Module, config: TrainerConfig) -> None:
    """Replaces a block's forward by a compiled or recomputed one, as configured. Parameter names stay."""
    forward: Callable[..., Any] = block.forward
    if config.compile:
        forward = torch.compile(forward)
    if config.activation_checkpointing:
        # A compiled block is a single operation, so there are no inner results to keep.
        keep = partial(create_selective_checkpoint_contexts, _keep)
        again = partial(checkpoint, forward, use_reentrant=False)
        forward = again if config.compile else partial(again, context_fn=keep)
    block.forward = forward


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def add_adapters(model: Causal, config: TrainerConfig) -> None:
    """Adds adapters beside every linear layer of every block, in place, and freezes all other weights."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ValueError(f"lora_rank={config.lora_rank} needs peft: pip install 'shoal-rl[lora]'") from None
    inside = {id(module) for block in model.blocks() for module in block.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]
    if not names:
        raise ValueError(
            f"lora_rank={config.lora_rank}: this model's blocks hold no nn.Linear; train all weights (lora_rank=0)"
        )
    settings = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=names)
    inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((_A, _B)))
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft gives them the dtype of the frozen weights


def fuse_adapters(model: Causal) -> None:
    """Makes every linear layer with an adapter compute by `project_adapted`, in place. Parameter names stay."""
    for block in model.blocks():
        for module in block.modules():
            if isinstance(module, Attention | MLP):
                module.project = project_adapted
            elif hasattr(
                module, "lora_A"
            ):  # a layer of transformers' model calls its linear layers one by one
                module.forward = partial(_project_one, module)


def _project_one(linear: Any, x: Tensor) -> Tensor:
    return project_adapted(x, linear)[0]


def project_adapted(x: Tensor, *linears: Any) -> tuple[Tensor, ...]:
    """Returns x W' + bias + scale x A' B' of each of the linear layers with adapters, which all read `x`."""
    bases, scale = [one.base_layer for one in linears], float(linears[0].scaling[_NAME])
    thin = [(one.lora_A[_NAME].weight, one.lora_B[_NAME].weight) for one in linears]
    if torch.compiler.is_compiling():  # the compiler joins the sum with what follows
        return tuple(
            F.linear(x, base.weight, base.bias) + F.linear(F.linear(x, a), b * scale)
            for base, (a, b) in zip(bases, thin, strict=True)
        )
    results: tuple[Tensor, ...] = _AdaptedLinears.apply(  # type: ignore[no-untyped-call]
        x,
        scale,
        len(linears),
        *(base.weight for base in bases),
        *(base.bias for base in bases),
        *(a for a, _ in thin),
        *(b for _, b in thin),
    )
    return results


class _AdaptedLinears(torch.autograd.Function):
    """Computes `project_adapted` with sums inside the matrix products.

    peft's own layer writes the adapter's product, scales it and adds it, each time as many values as the layer has results: in an
    MLP this moved four times the bytes of the results themselves. Here a product adds to the result that is there, and all A's of
    layers that read the same input are one matrix. The frozen weights get no gradient.

    R is the ranks of all adapters together.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: float, count: int, *matrices: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases, downs, ups = (matrices[at * count : (at + 1) * count] for at in range(4))
        x_TH = x.reshape(-1, x.shape[-1])
        downs_RH = downs[0] if count == 1 else torch.cat(downs)  # type: ignore[arg-type]
        thin_TR = x_TH @ downs_RH.T  # type: ignore[union-attr]
        results = []
        for weight, bias, up, part in zip(weights, biases, ups, _parts(thin_TR, ups), strict=True):
            result = F.linear(x_TH, weight, bias)  # type: ignore[arg-type]
            results.append(result.addmm_(part, up.T, alpha=scale).view(*x.shape[:-1], -1))  # type: ignore[union-attr]
        ctx.scale, ctx.count = scale, count
        ctx.save_for_backward(x, downs_RH, thin_TR, *weights, *ups)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, downs_RH, thin_TR, *matrices = ctx.saved_tensors
        count, scale = ctx.count, ctx.scale
        weights, ups = matrices[:count], matrices[count:]
        x_TH = x.reshape(-1, x.shape[-1])
        flat = [one.reshape(-1, one.shape[-1]) for one in gradients]
        of_thin_TR = torch.empty_like(thin_TR)
        of_ups = []
        for gradient, up, part, into in zip(
            flat, ups, _parts(thin_TR, ups), _parts(of_thin_TR, ups), strict=True
        ):
            torch.mm(gradient, up, out=into)
            of_ups.append((gradient.T @ part).mul_(scale))
        of_thin_TR *= scale
        of_downs = (of_thin_TR.T @ x_TH).split([up.shape[1] for up in ups])
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = flat[0] @ weights[0]
            for gradient, weight in zip(flat[1:], weights[1:], strict=True):
                of_x.addmm_(gradient, weight)
            of_x = of_x.addmm_(of_thin_TR, downs_RH).view(x.shape)
        return of_x, None, None, *([None] * 2 * count), *of_downs, *of_ups


def _parts(thin_TR: Tensor, ups: Sequence[Any]) -> tuple[Tensor, ...]:
    """Splits the values of all adapters that read one input by adapter."""
    parts: tuple[Tensor, ...] = thin_TR.split([up.shape[1] for up in ups], dim=1)
    return parts


def rounded_adapters(adapters: Mapping[str, Tensor], config: TrainerConfig) -> list[AdapterMatrices]:
    """Returns the adapters as whole numbers of 16 bits and a scale, from which everybody computes the same weights."""
    stems = [name.removesuffix(_A) for name in adapters if name.endswith(_A)]
    found = []
    for stem in stems:
        a, a_scale = _round_matrix(adapters[stem + _A])
        b, b_scale = _round_matrix(adapters[stem + _B])
        scale = config.lora_alpha / config.lora_rank * a_scale * b_scale
        found.append(AdapterMatrices(name=f"{stem}.weight", scale=scale, a=a, b=b))
    return found


def taken_adapters(
    own: Mapping[str, Tensor], published: Sequence[AdapterMatrices], config: TrainerConfig
) -> dict[str, Tensor]:
    """Returns the values of adapters' parameters by name: the published ones, or their own where those are rounded alike.

    A published scale is that of the product. A keeps its own scale, which hardly differs, and B gets the rest.
    """
    found: dict[str, Tensor] = {}
    rounded = {one.name: one for one in rounded_adapters(own, config)}
    for one in published:
        mine = rounded[one.name]
        stem = one.name.removesuffix(".weight")
        names = stem + _A, stem + _B
        if one.scale == mine.scale and np.array_equal(one.a, mine.a) and np.array_equal(one.b, mine.b):
            found |= {name: own[name] for name in names}
            continue
        a_scale = _round_matrix(own[names[0]])[1] or 1.0
        b_scale = one.scale / (config.lora_alpha / config.lora_rank * a_scale)
        for name, values, scale in zip(names, (one.a, one.b), (a_scale, b_scale), strict=True):
            found[name] = torch.from_numpy(values.astype(np.float64) * scale).float()
    return found


def _round_matrix(matrix: Tensor) -> tuple[npt.NDArray[np.int16], float]:
    exact = matrix.detach().double()
    scale = float(exact.abs().max()) / LEVELS
    rounded = (exact / scale).round_() if scale else exact
    return rounded.to(torch.int16).cpu().numpy(), scale


def adapted_weights(
    adapters: Sequence[AdapterMatrices], frozen: Callable[[str], Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Returns, for the name of every weight that has an adapter, a function that computes the weight with its adapter added.

    `frozen` returns a weight without its adapter. The operations are those of shardcast.adapter_delta.merge_words: the product
    is a sum of whole numbers and exact in float64, and each later operation rounds once.
    """

    def merged(one: AdapterMatrices) -> Tensor:
        base = frozen(one.name)
        left, right = (torch.from_numpy(values).to(base.device, torch.float64) for values in (one.b, one.a))
        return (left @ right).mul_(one.scale).add_(base.double()).float()

    return {one.name: partial(merged, one) for one in adapters}


def frozen_weight(model: nn.Module, name: str) -> Tensor:
    """Returns the weight beside which an adapter was added, by the name it has in the published file."""
    return model.get_parameter(f"{name.removesuffix('.weight')}.base_layer.weight")
