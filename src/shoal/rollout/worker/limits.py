"""What a worker may use of its owner's machine, and how each limit is enforced.

cores       the process may run on this many cores only (sched_setaffinity; where a system lacks it, torch gets as many threads)
memory_gb   on a CPU, the kernel refuses larger allocations (RLIMIT_DATA); on a GPU, torch does
disk_gb     older versions are deleted sooner; a version that does not fit is not fetched (version_cache.py)
download_mbit, upload_mbit
            bytes are read and sent no faster (net/rate_limit.py), over all connections together
"""

import os
import resource
import sys
from dataclasses import dataclass

from shoal.net.rate_limit import BandwidthLimit

GB = 1_000_000_000
SMALL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Kernels that oneDNN and torch's layer above it keep, each for one number of rows. The defaults take some hundred MB in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Limits of one worker; None means no limit."""

    cores: int | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None
    download_mbit: float | None = None
    upload_mbit: float | None = None

    @property
    def disk_bytes(self) -> int | None:
        return None if self.disk_gb is None else int(self.disk_gb * GB)

    def download(self) -> BandwidthLimit | None:
        """Returns the limit that all downloads of the worker share."""
        return None if self.download_mbit is None else BandwidthLimit(self.download_mbit * 1e6 / 8)

    def upload(self) -> BandwidthLimit | None:
        return None if self.upload_mbit is None else BandwidthLimit(self.upload_mbit * 1e6 / 8)


def limit_cores(cores: int | None) -> int:
    """Confines this process to `cores` of the cores it may use; returns how many it may use now.

    Call it before torch is imported: torch counts the cores then. Which ones depends on the process id, so that several
    workers on one machine do not all take the same.
    """
    if not hasattr(os, "sched_setaffinity"):
        return min(cores or sys.maxsize, os.cpu_count() or 1)
    allowed = sorted(os.sched_getaffinity(0))
    if cores is not None and cores < len(allowed):
        first = os.getpid() % len(allowed)
        os.sched_setaffinity(0, (allowed[first:] + allowed[:first])[:cores])
    return len(os.sched_getaffinity(0))


def limit_memory(memory_gb: float | None, device: str) -> None:
    """Makes larger allocations fail: of this process on a CPU, of torch on a GPU. Call it before torch is imported."""
    if memory_gb is None:
        return
    num_bytes = int(memory_gb * GB)
    kind = device.partition(":")[0]
    if kind == "cpu":
        for name, value in SMALL_CACHES.items():
            os.environ.setdefault(name, value)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        return
    import torch

    if kind == "mps":
        torch.mps.set_per_process_memory_fraction(min(2.0, num_bytes / torch.mps.recommended_max_memory()))
        return
    total = torch.cuda.get_device_properties(torch.device(device)).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), torch.device(device))
