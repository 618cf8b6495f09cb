"""`shoal serve`: an OpenAI-compatible endpoint whose answers can be checked with `shoal verify`.

    POST /v1/completions, /v1/chat/completions     answers in OpenAI's form, and under "shoal" what the check needs
    GET  /v1/models                                the one model

One thread owns the engine: handlers queue rows and wait for their results. Rows of all requests share the engine's batches.
"""

import argparse
import asyncio
import contextlib
import hashlib
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from shoal.background import BackgroundTask
from shoal.cli.commands.sample_answers import load_engine, model_folder
from shoal.cli.commands.verify_answer import (
    CHAT_PATH,
    COMPLETION_PATH,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    AnswerEvidence,
    AskedPrompt,
    Turn,
    answer_text,
    prompt_tokens,
)
from shoal.cli.run.supervise import EXIT_INTERRUPTED
from shoal.net.http_server import Server, listen
from shoal.rollout.engine.api import ComputeDtype, Engine, FinishedRow, GenerationRequest
from shoal.wire.codes import Rejected
from shoal.wire.record import Record
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import sample_seed

MAX_BODY_BYTES = 4 << 20
MAX_CHOICES = 128
IDLE_S = 0.2
"""Seconds between two looks at the stop signal while no row runs."""


class ServeError(Exception):
    """The engine's thread has ended; no further answer comes."""


class CompletionRequest(Record):
    """The fields of OpenAI's requests that are supported. Others are refused by name: ignoring one would change the answer."""

    # Python's clients write 1 for 1.0.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    model: str = ""
    prompt: str | None = None
    messages: tuple[Turn, ...] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    n: int = 1
    seed: int | None = None
    logprobs: bool | int | None = None
    top_p: float = 1.0
    stream: bool = False
    user: str | None = None


@dataclass(slots=True)
class _Waiting:
    """A request whose rows are being generated."""

    rows: Sequence[GenerationRequest]
    done: Future[list[FinishedRow]] = field(default_factory=Future)
    found: dict[int, FinishedRow] = field(default_factory=dict)


class EngineThread:
    """Runs the engine in one thread. `generate` may be called from any other."""

    def __init__(self, engine: Engine, stop: threading.Event) -> None:
        self._engine, self._stop = engine, stop
        self._queue: queue.Queue[_Waiting] = queue.Queue()
        self._open: dict[int, _Waiting] = {}
        self._num_taken = 0
        self._thread = BackgroundTask("engine", self._main_loop)

    def generate(self, rows: Sequence[GenerationRequest]) -> Future[list[FinishedRow]]:
        """Returns the finished rows, in order, once all of them have ended. A row that cannot run gives ValueError."""
        waiting = _Waiting(rows)
        self._queue.put(waiting)
        if self._thread.done:  # the thread no longer reads the queue
            with contextlib.suppress(InvalidStateError):
                waiting.done.set_exception(ServeError("the engine has stopped; the server's log says why"))
        return waiting.done

    def check(self) -> None:
        """Raises the error that ended the engine's thread, if one did."""
        if self._thread.done:
            self._thread.result()

    def _main_loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._take_requests()
                if self._engine.has_work:
                    self._hand_out(self._engine.step())
        finally:
            unfinished = list(self._open.values())
            while not self._queue.empty():
                unfinished.append(self._queue.get())
            for waiting in unfinished:
                with contextlib.suppress(InvalidStateError):
                    waiting.done.set_exception(
                        ServeError("the server stopped before the answer was complete")
                    )

    def _take_requests(self) -> None:
        """Submits what was queued. Waits for a request if no row runs."""
        block = not self._engine.has_work
        with contextlib.suppress(queue.Empty):
            while True:
                self._submit(self._queue.get(block, IDLE_S))
                block = False

    def _submit(self, waiting: _Waiting) -> None:
        number = self._num_taken
        self._num_taken += 1
        try:  # prompt_index tells the requests apart; it is 0 in what the client gets
            self._engine.submit([replace(row, prompt_index=number) for row in waiting.rows])
        except ValueError as error:
            waiting.done.set_exception(error)
            return
        self._open[number] = waiting

    def _hand_out(self, finished: Sequence[FinishedRow]) -> None:
        for row in finished:
            number = row.request.prompt_index
            waiting = self._open[number]
            waiting.found[row.request.sample_index] = row
            if len(waiting.found) == len(waiting.rows):
                del self._open[number]
                waiting.done.set_result([waiting.found[row.sample_index] for row in waiting.rows])


class AnswerServer:
    """The handlers of the endpoint."""

    def __init__(self, engine: Engine, thread: EngineThread, *, name: str, dtype: ComputeDtype) -> None:
        self._tokenizer, self._thread, self._name, self._dtype = engine.tokenizer, thread, name, dtype
        self.app = Starlette(
            routes=[
                Route(CHAT_PATH, self.handle_completion, methods=["POST"]),
                Route(COMPLETION_PATH, self.handle_completion, methods=["POST"]),
                Route("/v1/models", self.handle_models),
            ]
        )

    async def handle_models(self, request: Request) -> JSONResponse:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "shoal"}
        return JSONResponse({"object": "list", "data": [model]})

    async def handle_completion(self, request: Request) -> JSONResponse:
        chat = request.url.path == CHAT_PATH
        try:
            asked = _read_request(await _read_body(request), chat=chat)
            evidence = self._new_evidence(asked)
            rows = await asyncio.wrap_future(self._thread.generate(_rows_of(evidence)))
        except (Rejected, ValueError) as error:
            return _refusal(400, str(error))
        except ServeError as error:
            return _refusal(503, str(error))
        return JSONResponse(self._answer(evidence, rows, chat=chat))

    def _new_evidence(self, asked: CompletionRequest) -> AnswerEvidence:
        number = secrets.randbits(63) if asked.seed is None else asked.seed
        prompt = AskedPrompt(text=asked.prompt, turns=asked.messages)
        limit = asked.max_completion_tokens or asked.max_tokens
        return AnswerEvidence(
            seed=hashlib.sha256(f"serve/{number}".encode()).hexdigest(),
            temperature=asked.temperature,
            max_new_tokens=16 if limit is None else limit,
            samples=asked.n,
            compute_dtype=self._dtype,
            proof=ProofSpec(),
            prompt=prompt,
            prompt_tokens=tuple(prompt_tokens(self._tokenizer, prompt)),
        )

    def _answer(self, evidence: AnswerEvidence, rows: Sequence[FinishedRow], *, chat: bool) -> dict[str, Any]:
        evidence = evidence.with_rows(rows)
        num_new = sum(len(row.output_tokens) for row in rows)
        return {
            "id": f"shoal-{evidence.digest()[:24]}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [self._choice(number, row, chat=chat) for number, row in enumerate(rows)],
            "usage": {
                "prompt_tokens": len(evidence.prompt_tokens),
                "completion_tokens": num_new,
                "total_tokens": len(evidence.prompt_tokens) + num_new,
            },
            "shoal": evidence.model_dump(mode="json"),
        }

    def _choice(self, number: int, row: FinishedRow, *, chat: bool) -> dict[str, Any]:
        text = answer_text(self._tokenizer, row.output_tokens)
        names = [self._tokenizer.decode([token]) for token in row.output_tokens]
        common = {"index": number, "finish_reason": "stop" if row.finish is Finish.EOS else "length"}
        if not chat:
            logprobs: Mapping[str, Any] = {"tokens": names, "token_logprobs": list(row.logprobs)}
            return {**common, "text": text, "logprobs": logprobs}
        content = [
            {"token": name, "logprob": logprob, "bytes": list(name.encode()), "top_logprobs": []}
            for name, logprob in zip(names, row.logprobs, strict=True)
        ]
        message = {"role": "assistant", "content": text, "refusal": None}
        return {**common, "message": message, "logprobs": {"content": content, "refusal": None}}


async def _read_body(request: Request) -> bytes:
    """Returns the body. Raises ValueError at the first byte too many: a body without end must not fill the memory."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"the request has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _read_request(body: bytes, *, chat: bool) -> CompletionRequest:
    """Returns the request. Raises Rejected or ValueError that names the field which cannot be used."""
    asked = CompletionRequest.parse(body)
    given, other = (asked.messages, asked.prompt) if chat else (asked.prompt, asked.messages)
    if not given or other is not None:
        wanted, unwanted = ("messages", "prompt") if chat else ("prompt", "messages")
        raise ValueError(f"{wanted} must be given and not be empty, and {unwanted} must not be given")
    if asked.stream:
        raise ValueError(
            "stream=true is not supported; an answer is sent with its proofs, when it is complete"
        )
    if asked.top_p != 1.0:
        raise ValueError(
            f"top_p={asked.top_p} is not supported: a check repeats draws from the whole distribution"
        )
    limits = {"max_tokens": asked.max_tokens, "max_completion_tokens": asked.max_completion_tokens}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit} must be at least 1")
    if not 1 <= asked.n <= MAX_CHOICES:
        raise ValueError(f"n={asked.n} must be from 1 to {MAX_CHOICES}")
    if not MIN_TEMPERATURE <= asked.temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"temperature={asked.temperature} must be from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
        )
    return asked


def _rows_of(evidence: AnswerEvidence) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_index=0,
            sample_index=index,
            prompt_tokens=evidence.prompt_tokens,
            sample_seed=sample_seed(evidence.seed, 0, index),
            max_new_tokens=evidence.max_new_tokens,
            temperature=evidence.temperature,
        )
        for index in range(evidence.samples)
    ]


def _refusal(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status == 400 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


def serve(options: argparse.Namespace, stop: threading.Event) -> int:
    """Serves a model until `stop`."""
    with model_folder(options.model) as folder:
        engine = load_engine(folder, options)
        thread = EngineThread(engine, stop)
        name = options.model.rstrip("/").rsplit("/", 1)[-1]
        answers = AnswerServer(engine, thread, name=name, dtype=options.dtype)
        server = Server(answers.app, listen(options.host, options.port))
        server.start()
        print(f"serving {name} at http://{options.host}:{server.port}/v1", flush=True)
        try:
            while not stop.wait(IDLE_S):
                thread.check()
        finally:
            server.close()
    return EXIT_INTERRUPTED
