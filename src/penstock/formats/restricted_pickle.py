"""An unpickler that builds plain containers, texts and numbers only, with memory in proportion to the file.

It knows no class and calls nothing: every other operation is refused before it runs. Python's unpickler in C
allocates what a damaged pickle asks for, so the one in Python is the base. Keys of mappings are texts and
numbers: the hash of nested tuples may take for ever.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

_PLAIN = (
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE "
    "FRAME LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS "
    "SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3"
)


class PickleRefusedError(Exception):
    """A pickle has an operation, a class or a key that it may not have."""


class Operations(dict[int, Callable[[Any], None]]):
    """The allowed operations by their code: those of Python's unpickler with these names."""

    def __init__(self, names: str, refusal: type[Exception]) -> None:
        codes = [getattr(pickle, name)[0] for name in names.split()]
        super().__init__({code: pickle._Unpickler.dispatch[code] for code in codes})  # noqa: SLF001
        self._refusal = refusal

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise self._refusal(f"operation {chr(code)!r} is not allowed")


class RestrictedUnpickler(pickle._Unpickler):  # noqa: SLF001 -- the one in C has no limits
    """Builds plain values; a subclass that needs more has its own `dispatch`."""

    dispatch = Operations(_PLAIN, PickleRefusedError)
    refusal: ClassVar[type[Exception]] = PickleRefusedError
    key_types: ClassVar[tuple[type, ...]] = (str, int)
    stack: list[Any]

    def load_setitems(self) -> None:
        """Add several items to a mapping."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(self.stack[-1], key, value)

    def load_setitem(self) -> None:
        """Add one item to a mapping."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], key, value)

    def _set(self, target: object, key: object, value: object) -> None:
        if type(target) is not dict or not isinstance(key, self.key_types) or key in target:
            raise self.refusal("a mapping is not one of a valid file")
        target[key] = value


RestrictedUnpickler.dispatch |= {
    pickle.SETITEM[0]: RestrictedUnpickler.load_setitem,
    pickle.SETITEMS[0]: RestrictedUnpickler.load_setitems,
}


def unpickle_plain(content: bytes) -> object:
    """The plain value of a pickle; raises `PickleRefusedError` for everything else, and runs nothing."""
    file = io.BytesIO(content)
    try:
        value: object = RestrictedUnpickler(file).load()
    except PickleRefusedError:
        raise
    except Exception as error:  # noqa: BLE001 -- damaged content can raise anything
        raise PickleRefusedError(f"it is damaged ({type(error).__name__})") from None
    if file.tell() != len(content):
        raise PickleRefusedError("there is more after the end of the pickle")
    return value
