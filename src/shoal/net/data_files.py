"""Files that the operator's own services share by digest: fetched from the coordinator once, compared, kept."""

import os
from collections.abc import Iterable
from pathlib import Path

from shoal.net.http_client import SignedClient


def fetch_files(client: SignedClient, digests: Iterable[str], folder: Path, *, deadline_s: float) -> None:
    """Have the files of these SHA-256 digests in `folder`, under their digests. ValueError if other bytes come."""
    folder.mkdir(parents=True, exist_ok=True)
    for digest in digests:
        if (folder / digest).exists():
            continue
        what = f"the data file {digest[:16]}"
        data = client.fetch_object_until(what, digest, deadline_s=deadline_s)
        partial = folder / f"{digest}.{os.getpid()}.partial"
        partial.write_bytes(data)
        partial.rename(folder / digest)
