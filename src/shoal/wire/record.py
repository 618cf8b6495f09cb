"""The base of all records (frozen, strict, no unknown keys), their canonical JSON, and records sealed with a signature.

`parse` reads bytes from untrusted senders and raises Rejected. `canonical` returns the bytes that are hashed and
signed (RFC 8785), so that a record has the same digest on every machine.
"""

import hashlib
import json
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast

import rfc8785
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key, verify

Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""A whole number that JSON represents exactly and every database can store. Used for numbers from untrusted senders."""
Url = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.\-\[\]:]{1,255}(/[A-Za-z0-9._~/-]{0,255})?$")]


class Record(BaseModel):
    """Base class of everything that processes exchange."""

    # JSON has no infinity, but Python's parser reads 1e400 as one, and it would pass any lower bound.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, data: bytes | str) -> Self:
        """Returns the record in `data`. Raises Rejected with the first wrong field if it is not valid."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or cls.__name__
            raise Rejected("request.malformed", f"{cls.__name__}.{where}: {first['msg']}") from None

    @classmethod
    def copied_from(cls, source: object, **values: Any) -> Self:
        """Returns a record with these values, and with the attributes of `source`, such as a database row, for its other fields."""
        names = [name for name in cls.model_fields if name not in values and hasattr(source, name)]
        return cls(**{name: getattr(source, name) for name in names}, **values)

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        return hashlib.sha256(self.canonical()).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Returns the RFC 8785 bytes of plain JSON data. Raises Rejected if there are none (an integer past 2**53, an infinity)."""
    try:
        return _FAST_ENCODER.encode(_fast_encodable(value)).encode()
    except _NeedsReferenceEncoder:
        try:
            return rfc8785.dumps(value)
        except rfc8785.CanonicalizationError as error:
            raise Rejected("request.malformed", f"no canonical JSON: {str(error)[:200]}") from None


class _NeedsReferenceEncoder(Exception):
    """Raised for data that Python's own encoder may write differently from RFC 8785."""


_FAST_ENCODER = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":")
)
"""Python's encoder in C. On the data that `_fast_encodable` accepts it writes the same bytes as rfc8785, ten times as fast."""


def _fast_encodable(value: Any) -> Any:
    """Returns the data for `_FAST_ENCODER`. Raises _NeedsReferenceEncoder for non-ASCII text and for extreme numbers."""
    kind = type(value)
    if kind is str:
        if value.isascii():
            return value
        raise _NeedsReferenceEncoder
    if kind is dict:
        return {_ascii_name(name): _fast_encodable(item) for name, item in value.items()}
    if kind is list or kind is tuple:
        return [_fast_encodable(item) for item in value]
    if kind is float:
        return _short_number(value)
    if value is None or kind is bool or (kind is int and -_EXACT < value < _EXACT):
        return value
    raise _NeedsReferenceEncoder


_EXACT = 2**53


def _ascii_name(name: Any) -> str:
    if type(name) is str and name.isascii():
        return name
    raise _NeedsReferenceEncoder


def _short_number(value: float) -> float | int:
    # Both encoders write the shortest digits that parse to the same number. They differ in when they use an exponent, and
    # RFC 8785 writes 5.0 as 5.
    if value.is_integer() and -_EXACT < value < _EXACT:
        return int(value)
    if 1e-4 <= abs(value) < 1e15:
        return value
    raise _NeedsReferenceEncoder


class Sealable(Record):
    """A record that can be signed. Each kind has its own `tag`, so that its signature is not valid for another kind."""

    tag: ClassVar[str]


T = TypeVar("T", bound=Sealable)


class Sealed(Record, Generic[T]):
    """A record with its signer's key and the signature over `tag + newline + canonical body`."""

    body: T
    key: str
    signature: str

    def open(self, expected_key: str) -> T:
        """Returns the body. Raises Rejected unless `expected_key` signed it."""
        if self.key != expected_key:
            raise Rejected(
                "request.bad_signature",
                f"{type(self.body).__name__} is signed by {self.key[:16]}, expected {expected_key[:16]}",
            )
        if not verify(self.key, _sealed_bytes(self.body), self.signature):
            raise Rejected(
                "request.bad_signature",
                f"{type(self.body).__name__}: the signature by {self.key[:16]} does not match the body",
            )
        return self.body


def seal(body: T, key: Key, *, canonical: bytes | None = None) -> Sealed[T]:
    """Returns the body with a signature by `key`. Pass `canonical` (body.canonical()) if it is already computed."""
    # Pydantic makes one class per kind of body; another class would not serialize the body's own fields.
    kind = cast("type[Sealed[T]]", Sealed.__class_getitem__(type(body)))
    return kind(body=body, key=key.public, signature=key.sign(_sealed_bytes(body, canonical)))


def _sealed_bytes(body: Sealable, canonical: bytes | None = None) -> bytes:
    return body.tag.encode() + b"\n" + (canonical or body.canonical())
