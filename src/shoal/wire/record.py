"""The record: frozen, strict, unknown keys refused. And the two ways bytes become one.

`parse` is for bytes from a stranger and raises Rejected. `canonical` gives the bytes that are hashed and
signed (RFC 8785), so that a record has one digest wherever it is computed.
"""

import hashlib
import json
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
        return _PLAIN.encode(_plain(value)).encode()
    except _Unusual:
        return _canonical_json(value)


class _Unusual(Exception):
    """Something that Python's own encoder may write in another way than RFC 8785 has it."""


_PLAIN = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":"))
"""Python's encoder in C: on what `_plain` lets through it gives the same bytes, ten times as fast."""


def _plain(value: Any) -> Any:
    """The same data as strings, small integers and short fractions under ASCII names; else _Unusual."""
    kind = type(value)
    if kind is str:
        if value.isascii():
            return value
        raise _Unusual
    if kind is dict:
        return {_plain_name(name): _plain(one) for name, one in value.items()}
    if kind is list or kind is tuple:
        return [_plain(one) for one in value]
    if kind is float:
        return _plain_fraction(value)
    if value is None or kind is bool or (kind is int and -_EXACT < value < _EXACT):
        return value
    raise _Unusual


_EXACT = 2**53


def _plain_name(name: Any) -> str:
    if type(name) is str and name.isascii():
        return name
    raise _Unusual


def _plain_fraction(value: float) -> float | int:
    # Both write the shortest digits that read back the same; they differ in when an exponent is used, and in "5.0".
    if value.is_integer() and -_EXACT < value < _EXACT:
        return int(value)
    if 1e-4 <= abs(value) < 1e15:
        return value
    raise _Unusual


def _canonical_json(value: Any) -> bytes:
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


def seal(body: T, key: Key, *, canonical: bytes | None = None) -> Sealed[T]:
    """`canonical` is body.canonical(), for whoever has it already."""
    # Pydantic has one class per kind of body, and only that class writes the body's own fields.
    kind = cast("type[Sealed[T]]", Sealed.__class_getitem__(type(body)))
    return kind(body=body, key=key.public, signature=key.sign(_sealed_bytes(body, canonical)))


def _sealed_bytes(body: Sealable, canonical: bytes | None = None) -> bytes:
    return body.tag().encode() + b"\n" + (canonical or body.canonical())


__all__ = ["Count", "Record", "Sealable", "Sealed", "canonical_json", "seal"]
