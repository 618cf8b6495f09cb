"""Asking somebody who may be away, or no coordinator at all: what came of it, in words with what to look at."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

from shoal.net.http_client import Unreachable
from shoal.wire.codes import Rejected
from shoal.wire.messages import Info


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Whoever does not answer, or not with success, is Unreachable."""
    try:
        yield
    except httpx2.HTTPStatusError as error:
        raise no_coordinator(url, in_words(error)) from None
    except httpx2.HTTPError as error:
        raise Unreachable(
            f"{url}: {in_words(error)}; check the URL, and that the coordinator runs there"
        ) from None


def no_coordinator(url: str, answer: str) -> Unreachable:
    return Unreachable(f"{url} does not answer as a coordinator does ({answer}); check the URL")


def in_words(error: httpx2.HTTPError | Rejected) -> str:
    """httpx2's own sentence about a status ends with a link to somebody's page on it."""
    if isinstance(error, httpx2.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    if isinstance(error, Rejected):
        return error.detail
    return f"{type(error).__name__}: {error}"


def ask_info(http: httpx2.Client) -> Info:
    """The terms; Unreachable if what answers is something else."""
    try:
        return Info.parse(http.get("/v1/info").raise_for_status().content)
    except Rejected as rejected:
        raise no_coordinator(str(http.base_url), rejected.detail) from None
