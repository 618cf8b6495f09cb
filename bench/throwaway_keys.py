"""Throw-away keys against a real swarm: coordinator, trainer, relay, validator and one honest worker, each a process of its own.

`python bench/economics.py keys` runs it. Each attempt is a new key from a network of its own that sends a file made without a model: right
answers and wrong ones mixed so that every group has signal, proofs and log-probs of the right form. Some keys are patient: they deliver
three honest submissions first.
"""

import contextlib
import itertools
import json
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from liar_client import Liar, sha256_of
from swarm_processes import Swarm

from shoal.model.tokenizer import Tokenizer
from shoal.net.http_client import Refused, SignedClient
from shoal.rollout.adversary.lies import fabricate
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Receipt
from shoal.wire.messages import AskLease, AskUpload, Enrol, Enrolled, OpenSession, Session, Submit, Upload
from shoal.wire.record import Sealed
from shoal.wire.rollouts import encode
from shoal.wire.run_spec import PROTOCOL

THREADS = 4
HONEST_FIRST = 3
REFUSED_S = 1.0
"""Pause of an attacker that is refused a lease."""
ATTEMPT_S = 300.0
"""A limit that only a hang reaches."""


class Attack:
    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        self.url, self.tokenizer = url, tokenizer
        self.lies: list[str] = []
        self._lock, self._numbers = threading.Lock(), itertools.count(1)

    def attempt(self, _: int = 0) -> None:
        """Enrols a key, fabricates a file for its first lease and submits it."""
        number = next(self._numbers)
        address = f"127.{2 + number // 250}.{number % 250}.7"
        transport = httpx2.HTTPTransport(verify=False, local_address=address)
        client = SignedClient(
            self.url, Key.generate(), log=Log("bench"), stop=threading.Event(), transport=transport
        )
        with contextlib.closing(client):
            client.call("POST", "/v1/enrol", Enrol(protocol=PROTOCOL, software="bench"), Enrolled)
            epoch = client.call("POST", "/v1/session", OpenSession(software="bench"), Session).epoch
            give_up_s = time.monotonic() + ATTEMPT_S
            while time.monotonic() < give_up_s:
                with contextlib.suppress(Refused):
                    lease = client.call("POST", "/v1/leases", AskLease(epoch=epoch), Sealed[Lease]).body
                    self.lie(client, epoch, lease)
                    return
                time.sleep(REFUSED_S)

    def lie(self, client: SignedClient, epoch: int, lease: Lease) -> None:
        version = lease.policies[-1].version
        data = encode(fabricate(lease, version, self.tokenizer))
        what = {"epoch": epoch, "num_bytes": len(data), "sha256": sha256_of(data)}
        path = f"/v1/leases/{lease.lease_id}"
        upload = client.call("POST", f"{path}/upload", AskUpload.model_validate(what), Upload)
        client.put_upload(upload, data)
        submit = Submit.model_validate(what | {"policy_version": version})
        client.call("POST", f"{path}/submit", submit, Sealed[Receipt])
        with self._lock:
            self.lies.append(lease.lease_id)
            if len(self.lies) % 50 == 0:
                print(f"{len(self.lies)} files sent", file=sys.stderr, flush=True)


def attack(attempts: int, *, patient: int) -> bool:
    """Makes so many attempts and returns whether nothing of them was trained on."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        swarm = Swarm(
            folder / "swarm",
            last_version=10**6,
            relays=1,
            workers=1,
            deadline_s=600.0,
            settings={"heartbeat_s": 30.0, "lease_s": 60.0, "claim_s": 60.0, "eval_prompts": 0},
        )
        with swarm:
            swarm.wait_for_version(1, deadline_s=300.0)
            began_s, honest = time.monotonic(), 0
            first = Liar(swarm.url, folder / "first", address="127.1.9.1")
            attacker = Attack(swarm.url, first.tokenizer(first.session.ask_lease()))
            for number in range(patient):
                liar = Liar(swarm.url, folder / f"patient-{number}", address=f"127.1.{10 + number}.1")
                for _ in range(HONEST_FIRST):
                    lease = liar.session.ask_lease()
                    table = liar.work(lease)
                    liar.session.deliver(lease, encode(table), policy_version=table.policy_version)
                    honest += liar.verdict_on(lease).code == ACCEPTED
                attacker.lie(liar.client, liar.epoch, liar.session.ask_lease())
                liar.close()
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(attacker.attempt, range(attempts - len(attacker.lies))))
            took_s = time.monotonic() - began_s
            return _report(swarm, attacker, honest, took_s)


def _report(swarm: Swarm, attacker: Attack, honest: int, took_s: float) -> bool:
    lies = set(attacker.lies)

    def judged() -> bool:
        return lies <= {body["lease_id"] for _, body in events(swarm, *ENDS)}

    swarm.wait_for("verdicts on all lies", judged, deadline_s=600.0, pause_s=5.0)
    seen = swarm.stats()
    assert seen is not None and seen.newest_version is not None
    swarm.wait_for_version(seen.newest_version + 3, deadline_s=300.0)
    codes: Counter[str] = Counter()
    trained: list[str] = []
    worker = Key.load(swarm.folder / "worker-1" / "node.key").public
    blamed: Counter[str] = Counter()
    for _, body in events(swarm, *ENDS):
        code = str(body["code"])
        codes[code] += body["lease_id"] in lies
        blamed[code] += body.get("node") == worker and code.startswith("reject.")
    for _, body in events(swarm, "batch.formed"):
        trained += [group.split("-")[0] for group in body["group_ids"]]
    fabricated = sum(lease in lies for lease in trained)
    print(f"{len(lies)} fabricated files of {len(lies)} keys in {took_s:.0f} s, after {honest} honest ones")
    print(f"how they ended: { ({code: count for code, count in codes.items() if count}) }")
    print(f"groups trained on: {len(trained)}, fabricated: {fabricated}")
    print(f"refusals of the honest worker: {blamed.total()}")
    return fabricated == 0 and not blamed.total()


ENDS = ("verdict.given", "lease.void")


def events(swarm: Swarm, *types: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns events of the ledger from the database: a page of the HTTP route has few of them."""
    marks = ", ".join("?" * len(types))
    with contextlib.closing(sqlite3.connect(swarm.folder / "coordinator" / "shoal.db")) as db:
        rows = db.execute(f"SELECT type, body FROM ledger WHERE type IN ({marks})", types).fetchall()
    return [(kind, json.loads(body)) for kind, body in rows]
