"""`TransportError`: a message or a collective failed, told apart from every other error of the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch.distributed as dist


class Pending(Protocol):
    """A message or a collective on its way."""

    def wait(self) -> object:
        """Wait until it is complete."""


class TransportError(RuntimeError):
    """A connection between ranks broke, or a message did not arrive in time: then `timed_out`."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def wait(work: Pending) -> None:
    """Wait until a message or a collective is complete."""
    try:
        work.wait()
    except RuntimeError as error:
        del work  # the traceback refers to it, and it keeps the connections open
        _raise(error)


def post(call: Callable[..., Pending], *arguments: object) -> Pending:
    """Start a message or a collective; on a broken connection this fails already."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        _raise(error)


@contextmanager
def transport_errors() -> Iterator[None]:
    """Errors of the collectives inside are transport errors; nothing but collectives belongs inside."""
    try:
        yield
    except RuntimeError as error:
        _raise(error)


def is_transport_error(error: BaseException) -> bool:
    """Whether an error is of a connection, here or inside of a call of torch."""
    from_gloo = type(error) is RuntimeError and "gloo" in str(error)
    return isinstance(error, dist.DistError | TransportError) or from_gloo


def _raise(error: RuntimeError) -> NoReturn:
    """Raise a `TransportError`, but an error of a device or of its memory as it is."""
    from_gloo = type(error) is RuntimeError and "CUDA error" not in str(error)
    if from_gloo or isinstance(error, dist.DistError):
        raise TransportError(str(error), timed_out="Timed out" in str(error)) from error
    raise error
