"""A coordinator for trainer tests over real HTTP: it serves the run's spec, batches and objects, and takes announcements.

There are no workers: the batch of a version has groups of random answers that depend only on the version.
"""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.http_server import Server, listen
from shoal.trainer.io.publisher import OriginAddress
from shoal.trainer.io.recalibration import MeasureNoise
from shoal.trainer.loop import TrainerSite
from shoal.wire.codes import CODES, Rejected
from shoal.wire.keys import Key
from shoal.wire.messages import Announce, Batch, Group, Info, ProblemDetails, Recorded
from shoal.wire.proof_noise import NoiseDoubt
from shoal.wire.record import Record
from shoal.wire.request import Target, verify_request
from shoal.wire.rollouts import Finish, Rollout, RolloutTable, encode
from shoal.wire.run_spec import PROTOCOL, RunSpec, Sampling, TaskSpec

SAMPLES = 4


class SmallCoordinator:
    def __init__(self, *, last_version: int, has_rollouts: bool = True) -> None:
        self.run_key, self.trainer_key = Key.generate(), Key.generate()
        self.has_rollouts = has_rollouts
        self.announced: list[Announce] = []
        self.objects: dict[str, bytes] = {}
        self.downloads: list[str] = []
        self.spec = RunSpec(
            run="test",
            task=TaskSpec(name="sort", options={"length": 3}),
            compute_dtype="float32",
            sampling=Sampling(temperature=0.8, max_new_tokens=5, samples_per_prompt=SAMPLES),
            keep_versions=3,
            last_version=last_version,
        )
        self.before_announce: Callable[[Announce], None] = lambda told: None
        self.noise_doubt: NoiseDoubt | None = None
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator["SmallCoordinator"]:
        routes = [
            Route("/v1/info", self._handle(self.info)),
            Route("/v1/batches/{version}", self._handle(self.batch)),
            Route("/v1/objects/{sha256}", self._handle(self.read_object)),
            Route("/v1/policies", self._handle(self.announce), methods=["POST"]),
        ]
        server = Server(Starlette(routes=routes), listen("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.port}"
        server.start()
        try:
            yield self
        finally:
            server.close()

    def site(
        self, folder: Path, *, deadline_s: float = 30.0, measure_noise: MeasureNoise | None = None
    ) -> TrainerSite:
        """Returns the settings of a trainer of this run with the built-in model `tiny`."""
        return TrainerSite(
            folder=folder,
            model="tiny",
            coordinator_url=self.url,
            key=self.trainer_key,
            run_key=self.run_key,
            address=OriginAddress(),
            deadline_s=deadline_s,
            measure_noise=measure_noise,
        )

    def digests(self) -> dict[int, str]:
        """Returns the weights digest of every announced version; fails if one was announced with two digests."""
        found: dict[int, str] = {}
        for told in self.announced:
            digest = told.manifest.body.weights_digest
            assert found.setdefault(told.manifest.body.version, digest) == digest
        return found

    # -- routes -----------------------------------------------------------------------------------------

    def info(self, request: Request, body: bytes) -> Record:
        versions = self.digests()
        return Info(
            protocol=PROTOCOL,
            software="test",
            run_key=self.run_key.public,
            spec=self.spec,
            newest_version=max(versions, default=None),
            finished=self.spec.last_version in versions,
            server_time_s=time.time(),
            noise_doubt=self.noise_doubt,
        )

    def batch(self, request: Request, body: bytes) -> Record:
        version = int(request.path_params["version"])
        if not self.has_rollouts:
            raise Rejected(
                "request.too_early", "0 of 3 groups are ready; no worker is enrolled", retry_after_s=0.05
            )
        return self.make_batch(version)

    def read_object(self, request: Request, body: bytes) -> Response:
        self.downloads.append(request.path_params["sha256"])
        return Response(self.objects[request.path_params["sha256"]])

    def announce(self, request: Request, body: bytes) -> Record:
        told = Announce.parse(body)
        told.manifest.open(self.run_key.public)
        self.before_announce(told)
        self.announced.append(told)
        return Recorded(seq=len(self.announced))

    # -- the swarm ----------------------------------------------------------------------------------------

    def make_batch(self, version: int) -> Batch:
        rng = random.Random(version)
        groups = []
        # Two groups come from one file, and one from the version before, if there is one.
        for policy_version, num_prompts in ((version, 2), (max(0, version - 1), 1)):
            lease_id = f"{rng.getrandbits(128):032x}"
            rows = tuple(
                _row(rng, prompt, sample) for prompt in range(num_prompts) for sample in range(SAMPLES)
            )
            data = encode(RolloutTable(lease_id=lease_id, policy_version=policy_version, rows=rows))
            sha256 = hashlib.sha256(data).hexdigest()
            self.objects.setdefault(sha256, data)
            groups += [
                Group(
                    group_id=f"{lease_id}/{prompt}",
                    lease_id=lease_id,
                    sha256=sha256,
                    prompt_index=prompt,
                    policy_version=policy_version,
                    task=self.spec.task.title,
                    rewards=(*(float(rng.random() < 0.5) for _ in range(SAMPLES - 1)), 0.25),
                )
                for prompt in range(num_prompts)
            ]
        return Batch(version=version, groups=tuple(groups), dropped_groups=1, stale_groups=0, reward_mean=0.5)

    def _handle(self, route: Callable[[Request, bytes], Record | Response]) -> Callable[[Request], object]:
        async def handle(request: Request) -> Response:
            body = await request.body()
            target = Target(
                method=request.method,
                authority=request.headers["host"],
                path=request.url.path,
                query=request.url.query,
            )
            try:
                signer = verify_request(request.headers, target, body, now_s=time.time())
                assert signer.key == self.trainer_key.public
                answer = route(request, body)
            except Rejected as rejected:
                problem = ProblemDetails(
                    code=rejected.code,
                    detail=rejected.detail,
                    fix=CODES[rejected.code].remedy,
                    retry_after_s=rejected.retry_after_s,
                    server_time_s=time.time(),
                )
                return Response(problem.model_dump_json(), status_code=CODES[rejected.code].status)
            return answer if isinstance(answer, Response) else Response(answer.model_dump_json())

        return handle


def _row(rng: random.Random, prompt_index: int, sample_index: int) -> Rollout:
    num_outputs = rng.randint(1, 5)
    return Rollout(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_tokens=(1, 4 + prompt_index, 7),
        output_tokens=tuple(rng.randrange(3, 40) for _ in range(num_outputs)),
        logprobs=tuple(-rng.uniform(3, 5) for _ in range(num_outputs)),
        finish=Finish.LENGTH,
        proof=b"",
    )


class Stopper:
    """Sets `stop` when a version is announced and rejects it, so that the trainer ends before its announcement succeeds."""

    def __init__(self, stop: threading.Event, version: int) -> None:
        self._stop, self._version = stop, version

    def __call__(self, told: Announce) -> None:
        if told.manifest.body.version == self._version and not self._stop.is_set():
            self._stop.set()
            raise Rejected("request.too_early", "not now", retry_after_s=0.01)
