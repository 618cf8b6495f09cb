"""What this machine brings to a run, as its engine sees it."""

import os
from typing import Literal

import torch

from shoal.model.shape import FAMILIES
from shoal.wire.requirements import Capabilities


def capabilities(device: str) -> Capabilities:
    """Of `device`: cpu, or cuda with or without a number."""
    kind: Literal["cpu", "cuda"] = "cuda" if torch.device(device).type == "cuda" else "cpu"
    if kind == "cuda":
        num_bytes = torch.cuda.get_device_properties(torch.device(device)).total_memory
    else:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Capabilities(
        device=kind,
        memory_gb=num_bytes / 1e9,
        dtypes=("float32", "bfloat16"),
        families=FAMILIES,
    )
