"""What OFFLOAD moves to the host and RELOAD brings back: the tensors that a forward keeps for its backward.

The host's memory is a file without a name on CPUs, which no end of the process leaves behind, and pinned memory
on other devices, with copies on a stream of their own (not tested on GPUs). What others hold too, such as
parameters, is not moved: that would free nothing.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PipelineError
from penstock.runtime.dtensors import Sharding, is_dtensor, local, sharding_of
from penstock.runtime.execution.handover import storage_references
from penstock.runtime.transport.buffer_pool import Buffer

__all__ = ["HostStore", "Offloadable", "SavedTensors"]


class HostStore:
    """Bytes of one stage on the host."""

    def __init__(self) -> None:
        self._file: Any = None
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Places in the file below its end that can be used again, by size."""
        self._live = 0
        self._streams: dict[torch.device, Any] = {}

    def put(self, data: Tensor) -> tuple[int, Any]:
        """Copy a tensor of bytes; gives what `get` needs."""
        self._live += 1
        if data.device.type != "cpu":
            return len(data), self._on_stream(data, None)
        offset = self._free[len(data)].pop() if self._free[len(data)] else self._end
        try:
            self._write(data.numpy(), offset)
        except OSError as error:
            raise PipelineError(
                f"OFFLOAD cannot write {len(data)} bytes to a temporary file in {_directory()} that "
                f"has {self._end} bytes: {error}; free space there, or set TMPDIR to another directory"
            ) from error
        self._end = max(self._end, offset + len(data))
        return len(data), offset

    def _write(self, array: Any, offset: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- lives as long as the store
            weakref.finalize(self, self._file.close)
        self._file.seek(offset)
        data = memoryview(array)
        while data:
            data = data[self._file.write(data) :]

    def get(self, size: int, place: Any, device: torch.device) -> torch.UntypedStorage:
        """The bytes of a `put`, on its device again."""
        self._live -= 1
        if device.type != "cpu":
            return self._on_stream(place, device).untyped_storage()
        found = torch.empty(size, dtype=torch.uint8)
        try:
            self._read(found.numpy(), place)
            self._free[size].append(place)
            if not self._live:  # nothing is on the host: begin again
                self.clear()
        except OSError as error:
            raise PipelineError(
                f"RELOAD cannot read {size} bytes from its temporary file in {_directory()}: {error}"
            ) from error
        return found.untyped_storage()

    def _read(self, array: Any, offset: int) -> None:
        self._file.seek(offset)
        data = memoryview(array)
        while data:
            read = self._file.readinto(data)
            if not read:
                raise OSError("the file is shorter than what OFFLOAD wrote to it")
            data = data[read:]

    def clear(self) -> None:
        """Forget everything, as after a step that failed."""
        self._live = self._end = 0
        self._free.clear()
        if self._file is not None:
            self._file.truncate(0)

    def _on_stream(self, data: Tensor, device: torch.device | None) -> Tensor:
        """To pinned memory (device None), or back; the other stream is waited for where the copy is used."""
        own = data.device if device is None else device
        module = torch.get_device_module(own)
        stream = self._streams.setdefault(own, module.Stream(own))
        stream.wait_stream(module.current_stream(own))
        with module.stream(stream):
            if device is None:
                copy = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
            else:
                copy = torch.empty(len(data), dtype=torch.uint8, device=device)
            copy.copy_(data, non_blocking=True)
        module.current_stream(own).wait_stream(stream)
        if device is not None:
            copy.record_stream(module.current_stream(own))
        return copy


def _directory() -> str:
    """Where temporary files are; there may be no usable directory."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return "a directory for temporary files"


@dataclass(eq=False)
class Offloadable:
    """A tensor that can be moved to the host; None while it is there. Of a DTensor, its local tensor."""

    tensor: Tensor | None
    version: int
    sharding: tuple[Sharding, DeviceMesh] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Offloadable:
        """An alias: the tensor itself would keep the graph that saves it."""
        sharding = (sharding_of(tensor), tensor.device_mesh) if is_dtensor(tensor) else None
        own = local(tensor)
        return cls(own.detach(), own._version, sharding)  # noqa: SLF001

    @property
    def value(self) -> Tensor:
        """The tensor as it was given."""
        assert self.tensor is not None, "validation requires a RELOAD before each use"
        if self.sharding is None:
            return self.tensor
        how, mesh = self.sharding
        return how.build(self.tensor, mesh)


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

    def tensors(self) -> Iterator[Tensor]:
        """Those that are held and not on the host."""
        for entry in filter(None, (reference() for reference in self._entries)):
            if entry.tensor is not None:
                yield entry.tensor

    def offload(self, store: HostStore, buffers: Sequence[Buffer] = ()) -> tuple[Buffer, ...]:
        """Move what nobody else holds to the host; gives those of the message buffers that are still in use."""
        by_storage: dict[int, list[Offloadable]] = {}
        for entry in filter(None, (reference() for reference in self._entries)):
            tensor = entry.tensor
            if tensor is not None and type(tensor) is Tensor and tensor.layout == torch.strided:
                _check_version(entry)
                by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(entry)  # noqa: SLF001
        in_use = []
        for buffer in buffers:
            group = by_storage.pop(buffer.storage.untyped_storage()._cdata, [])  # noqa: SLF001
            if buffer.external_references > len(group):
                in_use.append(buffer)
            elif group:
                self._move(group, buffer.message, store)
        for group in by_storage.values():
            first = group[0].tensor
            if first is not None and storage_references(first) == len(group) and first.numel():
                storage = first.untyped_storage()
                del first
                data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self._move(group, data, store)
                del storage, data
        return tuple(in_use)

    def _move(self, group: list[Offloadable], data: Tensor, store: HostStore) -> None:
        """Move the tensors of a group, which are views of these bytes."""
        device, (size, place) = data.device, store.put(data)
        tensors = [entry.tensor for entry in group if entry.tensor is not None]
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
    _check_version(entry)
    return entry.value
