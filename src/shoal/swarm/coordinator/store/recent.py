"""What was put away lately, by name; the oldest is forgotten first. One process's own: another may have to look it up."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")
MOST = 4096


class Recent(Generic[T]):
    def __init__(self) -> None:
        self._kept: OrderedDict[str, T] = OrderedDict()

    def put(self, name: str, value: T) -> None:
        self._kept[name] = value
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)

    def get(self, name: str) -> T | None:
        return self._kept.get(name)

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)
