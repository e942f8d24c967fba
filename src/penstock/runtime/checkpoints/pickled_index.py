"""The index of format 1, a pickle, read with memory in proportion to its size.

Only the operations and classes that a valid index has are allowed; no other class is even imported.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from penstock.formats.restricted_pickle import Operations, RestrictedUnpickler
from penstock.runtime.checkpoints.atomic_directory import INDEX_FILE
from penstock.runtime.checkpoints.collective import RankError
from penstock.runtime.checkpoints.index_checks import DamageError

__all__ = ["unpickle_index"]

_OBJECTS: tuple[Any, ...] = (
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    filesystem._StorageInfo,  # noqa: SLF001 -- a part of every index
)
_ENCODING = metadata._MEM_FORMAT_ENCODING  # noqa: SLF001
_NAMED = {(each.__module__, each.__qualname__): each for each in (*_OBJECTS, _ENCODING)} | {
    ("torch", "Size"): torch.Size
}
_ALLOWED = (
    "APPEND APPENDS BINGET BININT BININT1 BININT2 BINUNICODE BUILD EMPTY_DICT EMPTY_LIST EMPTY_TUPLE FRAME "
    "LONG1 LONG_BINGET MARK MEMOIZE NEWFALSE NEWOBJ NEWTRUE NONE PROTO REDUCE SETITEM SETITEMS "
    "SHORT_BINUNICODE STACK_GLOBAL STOP TUPLE TUPLE1 TUPLE2 TUPLE3"
)


class _Unpickler(RestrictedUnpickler):
    """Builds nothing but the objects of a valid index."""

    dispatch = Operations(_ALLOWED, DamageError)
    refusal = DamageError
    key_types = (str, metadata.MetadataIndex)

    def find_class(self, module: str, name: str) -> Any:
        if known := _NAMED.get((module, name)):
            return known
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise RankError(
            f"its index {INDEX_FILE} refers to {module}.{name}, which is not allowed there. The index is "
            "damaged, or made to run code when it is loaded; nothing was run"
        )

    def load_newobj(self) -> None:
        if self.stack.pop() != () or self.stack[-1] not in _OBJECTS:
            raise DamageError("an object is not one of an index")
        self.stack[-1] = object.__new__(self.stack[-1])

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        if self.stack[-1] not in (torch.Size, _ENCODING, _layout):
            raise DamageError("a call is not one of an index")
        self.stack[-1] = self.stack[-1](*arguments)

    def load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]
        if type(built) not in _OBJECTS:
            raise DamageError("an object is not one of an index")
        if isinstance(built, metadata.TensorProperties):
            built.__setstate__(state)  # type: ignore[no-untyped-call]
        else:
            vars(built).update(state)


_Unpickler.dispatch |= {
    pickle.NEWOBJ[0]: _Unpickler.load_newobj,
    pickle.REDUCE[0]: _Unpickler.load_reduce,
    pickle.BUILD[0]: _Unpickler.load_build,
    pickle.SETITEM[0]: _Unpickler.load_setitem,
    pickle.SETITEMS[0]: _Unpickler.load_setitems,
}


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise DamageError(f"it has a tensor of layout {name!r}; only dense tensors are stored")
    return torch.strided


def unpickle_index(content: bytes) -> metadata.Metadata:
    """Read an index that is nothing but a pickle."""
    file = io.BytesIO(content)
    index = _Unpickler(file).load()
    if file.tell() != len(content):
        raise DamageError("there is more after the end of the pickle")
    if not isinstance(index, metadata.Metadata):
        raise DamageError(f"it is a {type(index).__name__}")
    return index
