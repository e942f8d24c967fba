"""What a stage holds between F and backward: saved tensors, what RECOMPUTE needs, and what is on the host."""

from __future__ import annotations

import random
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PipelineError
from penstock.runtime.backward.deferral import LayerMode
from penstock.runtime.data_parallel.replica_group import checksum
from penstock.runtime.dtensors import Sharding, is_dtensor, local, sharding_of
from penstock.runtime.stage.values import is_plain, storage_references
from penstock.runtime.torch_internals.autograd import storage_identity, version
from penstock.runtime.torch_internals.modules import attributes_set, own_buffers
from penstock.runtime.transport.buffer_pool import Buffer
from penstock.runtime.transport.channels import FlatValue


def eval_mode(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Put all submodules into eval mode, and restore the mode of each."""
    parts = (part for module in modules for part in module.modules())
    return attributes_set([(part, "training", False) for part in parts])


class RandomStates:
    """The states of all random number generators that a forward may use: torch's, Python's and numpy's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """`devices` are those besides the CPU."""
        self._cpu, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        self._devices = {device: torch.get_device_module(device).get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Set all generators to these states."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def preserved_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and the device at the end."""
    before = RandomStates([] if device.type == "cpu" else [device])
    try:
        yield
    finally:
        before.restore()


class HostStore:
    """Bytes of one stage on the host.

    The host's memory is a file without a name on CPUs, which no end of the process leaves behind, and pinned
    memory on other devices, with copies on a stream of their own (not tested on GPUs).
    """

    def __init__(self) -> None:
        self._file: Any = None
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Places in the file below its end that can be used again, by size."""
        self._live = 0
        self._streams: dict[torch.device, Any] = {}

    def put(self, data: Tensor) -> tuple[int, Any]:
        """Copy a tensor of bytes; return what `get` needs."""
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
        """Return the bytes of a `put`, on its device again."""
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
        """Copy to pinned memory (device None), or back; the current stream waits for the copy."""
        own = data.device if device is None else device
        module = torch.get_device_module(own)
        stream = self._streams.setdefault(own, module.Stream(own))
        stream.wait_stream(module.current_stream(own))
        with module.stream(stream):
            copy = torch.empty(len(data), dtype=torch.uint8, device=device, pin_memory=device is None)
            copy.copy_(data, non_blocking=True)
        module.current_stream(own).wait_stream(stream)
        if device is not None:
            copy.record_stream(module.current_stream(own))
        return copy


def _directory() -> str:
    """Return where temporary files are; there may be no usable directory."""
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
        """Return an alias: the tensor itself would keep the graph that saves it."""
        sharding = (sharding_of(tensor), tensor.device_mesh) if is_dtensor(tensor) else None
        own = local(tensor)
        return cls(own.detach(), version(own), sharding)

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

    They live as long as somebody else holds them: the graph frees them step by step in a backward. What others
    hold too, such as parameters, is not moved to the host: that would free nothing.
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

    def _present(self) -> Iterator[tuple[Offloadable, Tensor]]:
        """Yield the entries that are held and not on the host."""
        for entry in filter(None, (reference() for reference in self._entries)):
            if entry.tensor is not None:
                yield entry, entry.tensor

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that are held and not on the host."""
        return (tensor for _, tensor in self._present())

    def offload(self, store: HostStore, buffers: Sequence[Buffer] = ()) -> tuple[Buffer, ...]:
        """Move what nobody else holds to the host; return the message buffers that are still in use."""
        by_storage: dict[int, list[Offloadable]] = {}
        for entry, tensor in self._present():
            if type(tensor) is Tensor and tensor.layout == torch.strided:
                _check_version(entry)
                by_storage.setdefault(storage_identity(tensor), []).append(entry)
        in_use = []
        for buffer in buffers:
            group = by_storage.pop(storage_identity(buffer.storage), [])
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
                entry.version = version(entry.tensor)
        self._on_host = []


def _check_version(entry: Offloadable) -> None:
    if entry.tensor is not None and version(entry.tensor) != entry.version:
        raise PipelineError(
            "a tensor that the backward needs was changed in place after the forward saved it: change a clone()"
        )


def _unpack(entry: Offloadable) -> Tensor:
    _check_version(entry)
    return entry.value


def _was_dropped(_: object) -> NoReturn:
    raise PipelineError(
        "a backward uses the graph of a forward whose saved tensors were dropped, because the schedule "
        "recomputes it: the module keeps a tensor with its graph from one forward to another; detach it, or "
        "leave out the RECOMPUTE actions of its stage"
    )


class KeptForward:
    """What is kept of one microbatch from F to RECOMPUTE; created before F runs.

    F records its graph as always, so it computes the same bits, but the tensors that the graph would save are
    dropped at once, and the graph at the end of F. RECOMPUTE runs the module again on the same input, with the
    random states and the buffers that F began with, and keeps the graph; afterwards both are as before it.
    Autocast is the same, because both run in one step. Other state of a module, such as a counter, is not
    restored; if it changes the result, the two results differ, which is found on CPUs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mode: LayerMode,
        received: FlatValue | None,
        leaves: Sequence[object],
    ) -> None:
        """`modules` are that of the stage and of its loss, `leaves` those of all inputs of the stage."""
        self.mode = mode
        self._modules = tuple(modules)
        self.received = None if received is None else received._replace(leaves=list(received.leaves))
        """The output of the stages before it; None for a stage that gets the batch."""
        self._offloaded: dict[int, Offloadable] = {}
        self._inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._versions = [version(leaf) for leaf in self._inputs]
        parameters = (parameter for module in self._modules for parameter in module.parameters())
        self._devices = {p.device for p in parameters if p.device.type not in ("cpu", "meta")}
        self._random = RandomStates(self._devices)
        self._present = _buffers_of(self._modules)
        self._buffers = {place: buffer.clone() for place, buffer in self._present.items()}
        self._results: list[int | str] = []

    def hooks(self) -> saved_tensors_hooks:
        """Return the hooks under which F drops what its graph would save."""
        return saved_tensors_hooks(lambda _: None, _was_dropped)

    def keep_results(self, results: Iterable[Any]) -> None:
        """Keep what F has computed: RECOMPUTE must compute the same."""
        self._results = _checksums(results)

    def check_results(self, results: Iterable[Any], stage: int, microbatch: int) -> None:
        """Raise if RECOMPUTE has computed something else than F: its gradients would be those of this."""
        if _checksums(results) != self._results:
            raise PipelineError(
                f"stage {stage}: RECOMPUTE of microbatch {microbatch} gives another result than its F, so the "
                "gradients would be wrong: the forward uses something that changes from call to call, such as "
                "a counter or a random generator of its own. Keep a counter in a buffer, use torch's default "
                f"generator, or leave out the RECOMPUTE actions of stage {stage}"
            )

    def finish(self, stage: int) -> None:
        """After F: check that the input is as it was, and keep only the buffers that F has changed."""
        if [version(leaf) for leaf in self._inputs] != self._versions:
            raise PipelineError(
                f"stage {stage} changes its input in place, so its forward cannot be recomputed: change a "
                f"clone() of it, or leave out the RECOMPUTE actions of stage {stage}"
            )
        for place, buffer in _buffers_of(self._modules).items():
            # values are compared, because batch norm changes its statistics without counting a version
            if buffer is self._present.get(place) and torch.equal(buffer, self._buffers[place]):
                del self._buffers[place]
        self._inputs, self._present = [], {}

    def offload(self, host: HostStore) -> tuple[SavedTensors, tuple[Buffer, ...]]:
        """Move the input to the host, and return the message buffers that are free then.

        The input of a stage that gets the batch stays where it is.
        """
        self._offloaded = {}
        if self.received is None:
            return SavedTensors(), ()
        leaves, buffers = self.received.leaves, self.received.buffers
        for position in [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]:
            self._offloaded[position] = Offloadable.of(leaves[position])
            leaves[position] = None
        moved = SavedTensors(self._offloaded.values())
        in_use = moved.offload(host, buffers)
        self.received = self.received._replace(buffers=in_use)
        return moved, tuple(buffer for buffer in buffers if buffer not in in_use)

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is held and not on the host: the input, and the buffers that F has changed."""
        yield from self._buffers.values()
        yield from (entry.tensor for entry in self._offloaded.values() if entry.tensor is not None)
        if self.received is not None:
            yield from (leaf for leaf in self.received.leaves if isinstance(leaf, Tensor))

    def reloaded(self) -> None:
        """Put the input back, after RELOAD."""
        for position, entry in self._offloaded.items():
            assert self.received is not None
            self.received.leaves[position] = entry.value
        self._offloaded = {}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run with the random states and buffers that F began with."""
        now = RandomStates(self._devices)
        self._random.restore()
        current = _exchanged(self._modules, self._buffers)
        try:
            yield
        finally:
            _exchanged(self._modules, current)
            now.restore()


_COMPARED = (bool, int, float, str, bytes)
"""What is compared besides tensors; other objects need not be equal to a copy."""


def _checksums(results: Iterable[Any]) -> list[int | str]:
    """Sum up tensors on CPUs, numbers and texts; kernels of other devices may round differently each time."""
    found: list[int | str] = []
    for each in results:
        if type(each) in _COMPARED:
            found.append(repr(each))
        elif isinstance(each, Tensor) and each.device.type == "cpu" and is_plain(local(each)):
            found.append(int(checksum(each.detach().resolve_conj().resolve_neg())))
    return found


_Place: TypeAlias = tuple[int, str]
"""Where a buffer is: the number of its module, and its name there."""


def _buffers_of(modules: Sequence[nn.Module]) -> dict[_Place, Tensor]:
    return {
        (number, name): buffer
        for number, module in enumerate(modules)
        for name, buffer in module.named_buffers()
    }


def _exchanged(modules: Sequence[nn.Module], buffers: Mapping[_Place, Any]) -> dict[_Place, Any]:
    """Put these buffers into the modules, and return those that were there."""
    before = {}
    for place, buffer in buffers.items():
        owner_path, _, name = place[1].rpartition(".")
        owner = own_buffers(modules[place[0]].get_submodule(owner_path))  # assigning checks the type
        before[place], owner[name] = owner[name], buffer
    return before


def bytes_of(buffers: tuple[Buffer, ...], tensors: Iterable[Tensor], others: set[int]) -> int:
    """Return the bytes of buffers, and of the storages of tensors that are not among the others."""
    found = {storage_of(buffer.storage): buffer.nbytes for buffer in buffers}
    for tensor in tensors:
        if (storage := storage_of(tensor)) not in others:
            found.setdefault(storage, local(tensor).untyped_storage().nbytes())
    return sum(found.values())


def storage_of(tensor: Tensor) -> int:
    """Return the identity of the storage of a tensor, or of a DTensor's local tensor."""
    return storage_identity(local(tensor))
