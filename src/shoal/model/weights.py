"""Weights to and from a safetensors file: bfloat16, Hugging Face names, the same bytes for the same weights."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS_FILE = "model.safetensors"


FULL_BYTES = 1 << 20
"""A disk with less than this left is full."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What safetensors and torch.save say about a full disk, as the OSError it was, with the file's name."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        said = re.search(r"\(os error (\d+)\)", str(error))
        if said is not None:
            number = int(said.group(1))
        elif shutil.disk_usage(path.parent).free < FULL_BYTES:
            number = errno.ENOSPC
        else:
            raise
        raise OSError(number, os.strerror(number), str(path)) from None


def save_weights(model: nn.Module, path: Path) -> None:
    """Write all parameters as bfloat16; `path` is complete or absent."""
    save_tensors(model.named_parameters(), path)


def save_tensors(named: Iterable[tuple[str, Tensor]], path: Path, *, sync: bool = True) -> None:
    """As `save_weights`, of tensors that come one after another: none is held in another form than the file's.

    Without `sync` nobody waits for the disk: for files that are hashed before they are believed after a power cut.
    """
    rounded = {
        name: tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous() for name, tensor in named
    }
    tensors = dict(sorted(rounded.items()))
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with disk_errors(path):
        save_file(tensors, partial, metadata={"format": "pt"})
    if sync:
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(partial, path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy a file's values into the model's parameters, where they are: nothing is allocated or renamed.

    Names and shapes are compared before the first value is copied, so a wrong file changes nothing.
    """
    load_weight_files(model, [path])


def load_weight_files(model: nn.Module, paths: Iterable[Path]) -> None:
    """`load_weights` of a checkpoint that was cut into several files."""
    parameters = dict(model.named_parameters())
    # Some writers store a shared matrix twice, some store tables that a model computes for itself.
    passed_over = {"lm_head.weight", *(name for name, _ in model.named_buffers())} - parameters.keys()
    homes: dict[str, Path] = {}
    for path in paths:
        homes |= _check_file(path, parameters, passed_over)
    if missing := sorted(parameters.keys() - homes.keys()):
        raise ValueError(
            f"{sorted(set(homes.values()))[0] if homes else 'no file'}: {len(missing)} parameters are missing, "
            f"first {missing[0]!r}; does config.json belong to these weights?"
        )
    with torch.no_grad():
        for path in sorted(set(homes.values())):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    if homes.get(name) == path:
                        parameters[name].copy_(file.get_tensor(name))


def _check_file(path: Path, parameters: Mapping[str, Tensor], passed_over: set[str]) -> dict[str, Path]:
    if not path.exists():
        raise FileNotFoundError(f"no weights at {path}; a model folder holds {WEIGHTS_FILE}")
    found: dict[str, Path] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                if name in passed_over:
                    continue
                if name not in parameters:
                    raise ValueError(
                        f"{path}: {name!r} is no parameter of this model; does config.json belong to it?"
                    )
                stored, wanted = tuple(file.get_slice(name).get_shape()), tuple(parameters[name].shape)
                if stored != wanted:
                    raise ValueError(f"{path}: {name} has shape {stored}, config.json asks for {wanted}")
                found[name] = path
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
    return found
