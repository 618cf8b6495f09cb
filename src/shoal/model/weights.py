"""Saves and loads weights as safetensors: bfloat16, Hugging Face names, the same bytes for the same weights."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.files import restore_disk_error, write_atomically

WEIGHTS_FILE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Types of safetensors that weights may be stored as. torch cannot read some others, and integers are no weights without a scale."""


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes all parameters as bfloat16. The file is either complete or absent."""
    save_tensors(model.named_parameters(), path)


def save_tensors(named: Iterable[tuple[str, Tensor]], path: Path, *, sync: bool = True) -> None:
    """Writes named tensors as `save_weights` does. They are converted one after another, so only the bfloat16 copies are held.

    `sync=False` does not wait for the disk; for files whose digest is checked before they are used after a power cut.
    """
    rounded = {
        name: tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous() for name, tensor in named
    }
    tensors = dict(sorted(rounded.items()))
    with restore_disk_error(path, SafetensorError), write_atomically(path, durable=sync) as file:
        save_file(tensors, file.name, metadata={"format": "pt"})


def load_weights(model: nn.Module, path: Path) -> None:
    """Copies a file's values into the model's parameters in place. Without the file, the shards beside it are read.

    Names, shapes and types are checked before the first value is copied, so a wrong file changes nothing.
    """
    load_weight_files(model, find_weight_files(path))


def find_weight_files(path: Path) -> list[Path]:
    """Returns the file, or without it the shards beside it. Raises FileNotFoundError if there are neither."""
    if path.exists():
        return [path]
    if shards := sorted(path.parent.glob("model-*-of-*.safetensors")):
        return shards
    raise FileNotFoundError(f"no weights at {path}; {explain_missing_weights(path.parent)}")


def explain_missing_weights(folder: Path) -> str:
    """Returns what a folder without weights holds instead, and what to do."""
    if (folder / "adapter_config.json").exists():
        return f"{folder} is an adapter, not a whole model; merge it into its base model first"
    if any(folder.glob("*.bin")):
        return f"{folder} has *.bin files only; convert the weights to safetensors first"
    return f"a model folder holds {WEIGHTS_FILE}"


def load_weight_files(model: nn.Module, paths: Iterable[Path]) -> None:
    """Copies the values of a checkpoint in several files into the model's parameters in place."""
    parameters = dict(model.named_parameters())
    # Some writers store a tied matrix twice, or tables that the model computes itself.
    ignored = {"lm_head.weight", *(name for name, _ in model.named_buffers())} - parameters.keys()
    file_of: dict[str, Path] = {}
    for path in paths:
        file_of |= dict.fromkeys(_check_file(path, parameters, ignored), path)
    if missing := sorted(parameters.keys() - file_of.keys()):
        raise ValueError(
            f"{min(file_of.values()) if file_of else 'no file'}: {len(missing)} parameters are missing, "
            f"first {missing[0]!r}; does config.json belong to these weights?"
        )
    with torch.no_grad():
        for path in sorted(set(file_of.values())):
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    if file_of.get(name) == path:
                        parameters[name].copy_(file.get_tensor(name))


def stored_names(paths: Iterable[Path]) -> set[str]:
    """Returns the names of all tensors in these files; none for a file that cannot be read, which loading it reports."""
    names: set[str] = set()
    for path in paths:
        with contextlib.suppress(SafetensorError), safe_open(path, framework="pt", device="cpu") as file:
            names |= set(file.keys())
    return names


def _check_file(path: Path, parameters: Mapping[str, Tensor], ignored: set[str]) -> list[str]:
    """Returns the names of the parameters in a file. Raises ValueError for a tensor that does not fit the model."""
    found = []
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118
                if name in ignored:
                    continue
                if name not in parameters:
                    raise ValueError(
                        f"{path}: {name!r} is not a parameter of this model; does config.json belong to it?"
                    )
                found_slice = file.get_slice(name)
                if (kind := found_slice.get_dtype()) not in FLOATS:
                    raise ValueError(
                        f"{path}: {name} is stored as {kind}; known: {', '.join(FLOATS)}; convert it to one of these"
                    )
                stored, wanted = tuple(found_slice.get_shape()), tuple(parameters[name].shape)
                if stored != wanted:
                    raise ValueError(f"{path}: {name} has shape {stored}, config.json asks for {wanted}")
                found.append(name)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
    return found
