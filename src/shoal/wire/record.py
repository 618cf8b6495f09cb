"""The record: frozen, strict, unknown keys refused. And the two ways bytes become one.

`parse` is for bytes from a stranger and raises Rejected. `canonical` gives the bytes that are hashed and
signed (RFC 8785), so that a record has one digest wherever it is computed.
"""

import hashlib
from typing import Annotated, Any, Generic, Self, TypeVar, cast

import rfc8785
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key, verify

Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""A whole number that JSON carries exactly and every database can hold. For numbers that strangers send."""


class Record(BaseModel):
    """Base of everything that crosses a border."""

    # JSON has no infinity, but Python's reader makes one of 1e400: it would pass any lower bound.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or cls.__name__
            raise Rejected("request.malformed", f"{cls.__name__}.{where}: {first['msg']}") from None

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        return hashlib.sha256(self.canonical()).hexdigest()


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of plain JSON data; Rejected if it has none (an integer past 2**53, an infinity)."""
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise Rejected("request.malformed", f"no canonical JSON: {str(error)[:200]}") from None


class Sealable(Record):
    """A record that the run key signs. `tag` keeps a signature from counting as one for another kind."""

    @classmethod
    def tag(cls) -> str:
        raise NotImplementedError(f"{cls.__name__} names no signature tag")


T = TypeVar("T", bound=Sealable)


class Sealed(Record, Generic[T]):
    """A record with the signature of whoever vouches for it, over `tag + newline + canonical body`."""

    body: T
    key: str
    signature: str

    def open(self, expected_key: str) -> T:
        """The body, if `expected_key` signed it; else Rejected."""
        if self.key != expected_key:
            raise Rejected(
                "request.bad_signature",
                f"{type(self.body).__name__} is signed by {self.key[:16]}, expected {expected_key[:16]}",
            )
        if not verify(self.key, _sealed_bytes(self.body), self.signature):
            raise Rejected(
                "request.bad_signature",
                f"{type(self.body).__name__}: the signature by {self.key[:16]} does not fit the body",
            )
        return self.body


def seal(body: T, key: Key) -> Sealed[T]:
    # Pydantic has one class per kind of body, and only that class writes the body's own fields.
    kind = cast("type[Sealed[T]]", Sealed.__class_getitem__(type(body)))
    return kind(body=body, key=key.public, signature=key.sign(_sealed_bytes(body)))


def _sealed_bytes(body: Sealable) -> bytes:
    return body.tag().encode() + b"\n" + body.canonical()


__all__ = ["Count", "Record", "Sealable", "Sealed", "canonical_json", "seal"]
