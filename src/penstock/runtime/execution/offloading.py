"""What OFFLOAD moves to the host and RELOAD brings back: the tensors that a forward keeps for its backward.

The host's memory is a file without a name on CPUs, which no end of the process leaves behind, and pinned memory
on other devices, with copies on a stream of their own (not tested on GPUs). What others hold too, such as
parameters, is not moved: that would free nothing.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PipelineError
from penstock.runtime.execution.handover import storage_references

__all__ = ["HostStore", "Offloadable", "SavedTensors"]


class HostStore:
    """Bytes of this rank on the host."""

    def __init__(self) -> None:
        self._file: Any = None
        self._end = 0
        self._live = 0
        self._streams: dict[torch.device, Any] = {}

    def put(self, storage: torch.UntypedStorage) -> tuple[int, Any]:
        """Copy the bytes of a storage; gives what `get` needs."""
        self._live += 1
        if storage.device.type != "cpu":
            return storage.nbytes(), self._on_stream(storage, None)
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- lives as long as the store
            weakref.finalize(self, self._file.close)
        offset, size = self._end, storage.nbytes()
        self._file.seek(offset)
        data = _bytes_of(storage)
        while data:
            data = data[self._file.write(data) :]
        self._end += size
        return size, offset

    def get(self, size: int, place: Any, device: torch.device) -> torch.UntypedStorage:
        """The bytes of a `put`, on its device again."""
        self._live -= 1
        if device.type != "cpu":
            moved: torch.UntypedStorage = self._on_stream(place, device)
            return moved
        storage = torch.empty(size, dtype=torch.uint8).untyped_storage()
        self._file.seek(place)
        data = _bytes_of(storage)
        while data:
            read = self._file.readinto(data)
            if not read:
                raise PipelineError(
                    "the file with offloaded activations is shorter than what was written to it"
                )
            data = data[read:]
        if not self._live:  # nothing is on the host: begin again
            self._file.truncate(0)
            self._end = 0
        return storage

    def clear(self) -> None:
        """Forget everything, as after a step that failed."""
        self._live = self._end = 0
        if self._file is not None:
            self._file.truncate(0)

    def _on_stream(self, storage: Any, device: torch.device | None) -> Any:
        """To pinned memory (device None), or back; the other stream is waited for where the copy is used."""
        own = storage.device if device is None else device
        module, size = torch.get_device_module(own), storage.nbytes()
        stream = self._streams.setdefault(own, module.Stream(own))
        stream.wait_stream(module.current_stream(own))
        with module.stream(stream):
            if device is None:
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=True).untyped_storage()
            else:
                copy = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
            copy.copy_(storage, non_blocking=True)
        module.current_stream(own).wait_stream(stream)
        return copy


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    """A view of bytes that files read and write."""
    array: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memoryview(array)


@dataclass(eq=False)
class Offloadable:
    """A tensor that can be moved to the host; None while it is there."""

    tensor: Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Offloadable:
        """An alias: the tensor itself would keep the graph that saves it."""
        return cls(tensor.detach(), tensor._version)  # noqa: SLF001


class SavedTensors:
    """The tensors that one microbatch keeps: those that autograd saves under `hooks`, or given ones.

    They live as long as somebody else holds them: the graph frees them step by step in a backward.
    """

    def __init__(self, given: Iterable[Offloadable] = ()) -> None:
        self._entries = [weakref.ref(entry) for entry in given]
        self._on_host: list[tuple[list[tuple[Offloadable, Any]], int, Any, torch.device]] = []

    def hooks(self) -> saved_tensors_hooks:
        """While active, what autograd saves can be moved."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Offloadable:
        entry = Offloadable.of(tensor)
        self._entries.append(weakref.ref(entry))
        return entry

    def offload(self, store: HostStore) -> None:
        """Move what nobody else holds to the host."""
        by_storage: dict[int, list[Offloadable]] = {}
        for entry in filter(None, (reference() for reference in self._entries)):
            tensor = entry.tensor
            if tensor is not None and type(tensor) is Tensor and tensor.layout == torch.strided:
                _check_version(entry)
                by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(entry)  # noqa: SLF001
        for group in by_storage.values():
            first = group[0].tensor
            if first is not None and storage_references(first) == len(group) and first.numel():
                self._move(group, store)

    def _move(self, group: list[Offloadable], store: HostStore) -> None:
        tensors = [entry.tensor for entry in group if entry.tensor is not None]
        device, (size, place) = tensors[0].device, store.put(tensors[0].untyped_storage())
        views = [(t.dtype, t.storage_offset(), t.size(), t.stride()) for t in tensors]
        self._on_host.append((list(zip(group, views)), size, place, device))
        for entry in group:
            entry.tensor = None

    def reload(self, store: HostStore) -> None:
        """Bring back what is on the host."""
        for group, size, place, device in self._on_host:
            storage = store.get(size, place, device)
            for entry, (dtype, offset, shape, stride) in group:
                entry.tensor = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, stride)
                entry.version = entry.tensor._version  # noqa: SLF001
        self._on_host = []


def _check_version(entry: Offloadable) -> None:
    if entry.tensor is not None and entry.tensor._version != entry.version:  # noqa: SLF001
        raise PipelineError(
            "a tensor that the backward needs was changed in place after the forward saved it: change a clone()"
        )


def _unpack(entry: Offloadable) -> Tensor:
    assert entry.tensor is not None, "validation requires a RELOAD before each use"
    _check_version(entry)
    return entry.tensor
