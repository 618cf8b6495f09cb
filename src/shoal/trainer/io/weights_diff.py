"""Compares a learner's weights with the published file on the device, and brings only changed words to the host.

    host      file image of version 7 ──range──▶ ┐                     ┌──▶ positions and words that changed
    device                master weights ──bf16──▶ compare, compact ───┘

The published file is held once, in host memory (shardcast.file_image): device memory has room for two ranges only. The copies and
the comparison have a CUDA stream of their own, so that they run beside the next step's forward and backward pass.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.shardcast.file_image import RANGE_WORDS, ChangedWords, FileImage
from shoal.trainer.memory import pin_memory, unpin_memory

Sources = Mapping[str, Callable[[], Tensor]]
"""For each tensor of the file that can change: a function that returns its current value."""
DENSE = 6
"""If more than one in this many words of a range changed, the whole range is copied: a position takes 4 bytes, a word 2."""
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in the file, in words."""

    start: int
    num_words: int
    shape: tuple[int, ...]


def tensor_places(image: FileImage) -> dict[str, TensorPlace]:
    """Returns the place of every tensor of a safetensors file, in the file's order."""
    length = int.from_bytes(image.view[:_LENGTH_BYTES], "little")
    header: dict[str, Any] = json.loads(bytes(image.view[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    header.pop("__metadata__", None)
    places: dict[str, TensorPlace] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        start, stop = (_LENGTH_BYTES + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] != "BF16" or start % 2:
            raise ValueError(
                f"{name} is {entry['dtype']} at byte {start}; a published file has aligned BF16 tensors"
            )
        places[name] = TensorPlace(start // 2, (stop - start) // 2, tuple(entry["shape"]))
    return places


class WeightsDiff:
    """Finds the words of one file image that a learner's weights have changed."""

    def __init__(self, image: FileImage, device: torch.device) -> None:
        self.image = image
        self.places = tensor_places(image)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pinned = False
        if device.type == "cuda":
            # High priority, because the next update waits for the end of the comparison: its short kernels must not queue behind
            # those of the forward pass.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._pinned = pin_memory(image.words.ctypes.data, image.words.nbytes)

    def close(self) -> None:
        """Unpins the image's memory."""
        if self._pinned:
            unpin_memory(self.image.words.ctypes.data)
            self._pinned = False

    def published(self, name: str) -> Tensor:
        """Returns a tensor of the published file, as bfloat16 in host memory. It shares the image's memory."""
        place = self.places[name]
        words = self.image.words[place.start : place.start + place.num_words]
        return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).view(place.shape)

    def changes(self, sources: Sources, after: "torch.cuda.Event | None" = None) -> list[ChangedWords]:
        """Returns the changed words of every range, in order. The image stays as it is.

        `after` is an event that the weights' last update precedes. The weights must not change until this returns.
        """
        if unknown := sorted(sources.keys() - self.places.keys()):
            raise ValueError(f"the published file has no tensor {unknown[0]!r}")
        with torch.no_grad(), on_stream(self._stream, after):
            values = _CurrentValues(self.places, sources)
            return [self._compare(start, values) for start in range(0, self.image.words.size, RANGE_WORDS)]

    def _compare(self, start: int, values: "_CurrentValues") -> ChangedWords:
        words = self.image.words[start : start + RANGE_WORDS]
        pieces = values.within(start, start + words.size)
        if not pieces:
            return ChangedWords(start, np.empty(0, np.int32), words[:0])
        old = torch.from_numpy(words.view(np.int16)).to(self._device, non_blocking=True)
        new = old.clone()
        for offset, values_N in pieces:
            into = new[offset : offset + values_N.numel()].view(torch.bfloat16)
            into.copy_(values_N)
        places = (new != old).nonzero().view(-1)
        if places.numel() * DENSE > new.numel():
            return ChangedWords(start, None, _to_words(new))
        return ChangedWords(start, places.to(torch.int32).cpu().numpy(), _to_words(new[places]))


class _CurrentValues:
    """The learner's weights by their place in the file. A computed tensor is kept only while ranges need it."""

    def __init__(self, places: Mapping[str, TensorPlace], sources: Sources) -> None:
        self._wanted = [(place, sources[name]) for name, place in places.items() if name in sources]
        self._values: dict[int, Tensor] = {}
        self._first = 0

    def within(self, start: int, stop: int) -> list[tuple[int, Tensor]]:
        """Returns (offset in the range, flat values) of each tensor that lies in the range. Ranges must ascend."""
        found = []
        for index in range(self._first, len(self._wanted)):
            place, source = self._wanted[index]
            if place.start >= stop:
                break
            last = place.start + place.num_words
            if last > start:
                if index not in self._values:
                    self._values[index] = source().detach().reshape(-1)
                first_word, last_word = max(start, place.start), min(stop, last)
                part = self._values[index][first_word - place.start : last_word - place.start]
                found.append((first_word - start, part))
            if last <= stop:
                self._values.pop(index, None)
                self._first = index + 1
        return found


def record_event(device: torch.device) -> "torch.cuda.Event | None":
    """Returns an event that follows everything that this thread has started on the device; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextlib.contextmanager
def on_stream(stream: "torch.cuda.Stream | None", after: "torch.cuda.Event | None") -> Iterator[None]:
    """Runs the block on a CUDA stream of its own, after an event, and waits for its end. Does nothing without a stream."""
    if stream is None:
        yield
        return
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


def _to_words(values: Tensor) -> "np.ndarray[Any, np.dtype[np.uint16]]":
    return values.cpu().numpy().view(np.uint16)


def count_changed(changes: list[ChangedWords], image: FileImage) -> int:
    """Returns how many words of the image change."""
    total = 0
    for change in changes:
        if change.places is None:
            old = image.words[change.start : change.start + change.words.size]
            total += int(np.count_nonzero(old != change.words))
        else:
            total += change.places.size
    return total
