"""`shoal check-local`: the validator's own code on one's own file, so that nobody debugs against a run."""

import hashlib
import json
import secrets
import time
from pathlib import Path

from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.recompute import Policy
from shoal.swarm.validator.table_reader import Reader
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Claim
from shoal.wire.run_spec import RunSpec


def check_file(file: Path, lease_file: Path, versions: Path, spec: RunSpec) -> Verdict:
    """The verdict a validator would give, but for copies of others' files, which only the coordinator can know of, and for rewards where
    the task reads files: those are not public."""
    kept = json.loads(lease_file.read_text(encoding="utf-8"))
    lease, version = Lease.parse(json.dumps(kept["lease"])), int(kept["policy_version"])
    folder = versions / f"v{version}"
    if not folder.exists():
        raise ValueError(
            f"version {version}, which made {file}, is no longer in {versions}; check a newer file"
        )
    data = file.read_bytes()
    claim = Claim(
        lease=lease,
        policy_version=version,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        received_at_s=time.time(),
        deadline_s=time.time() + 3600,
        copy_of=None,
    )
    decoder = load_decoder(folder, dtype=DTYPES[spec.compute_dtype])
    policy = Policy(version, decoder, load_tokenizer(folder))
    with Reader() as reader:
        return judge(data, claim, spec, policy, reader=reader, control_seed=secrets.randbits(64))
