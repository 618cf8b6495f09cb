"""An upload that is awaited, as its row has it."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from shoal.net.object_store import Declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected(Declared):
    """What must come in under a token. The token is the permission."""

    lease_id: str


def expected_of(upload: Row[Any]) -> Expected:
    return Expected(
        token=upload.token,
        sha256=upload.sha256,
        num_bytes=upload.num_bytes,
        asked_at_s=upload.asked_at_s,
        expires_at_s=upload.expires_at_s,
        lease_id=upload.lease_id,
    )
