"""The command as a whole: how it ends when the user presses Ctrl-C, and when what it says cannot be written."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from fleetctl.errors import FleetctlError, InterruptedByUser
from fleetctl.lazy import LazyGroup
from machinery.overriding import override

# What writing brings where there is no room or no device; a reader that went away (EPIPE) is click's.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Program(LazyGroup):
    """The group of all verbs."""

    @override
    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        with _ended_well():
            return super().make_context(info_name, args, parent, **extra)

    @override
    def invoke(self, ctx: click.Context) -> Any:
        with _ended_well():
            try:
                return super().invoke(ctx)
            finally:
                # At the interpreter's end nobody could say any more that it failed. Unlike sys.stdout.flush(), print
                # does not mind that there is no output at all (>&-).
                print(end="", flush=True)


@contextmanager
def _ended_well() -> Iterator[None]:
    """Have Ctrl-C become exit code 130 at any time, and a full disk a sentence."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted") from None
    except (OSError, BaseExceptionGroup) as error:
        first = _first(error)
        if not isinstance(first, OSError) or first.errno not in _FULL:
            raise
        _give_up_output()
        what = first.filename or "the output"
        raise FleetctlError(f"cannot write {what}: {first.strerror}") from error


def _first(error: BaseException) -> BaseException:
    """Return what went wrong first, in a task group's tasks or by itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _give_up_output() -> None:
    """Lead what is still to be written nowhere.

    It would fail again at the interpreter's end, with words of Python's and exit code 120.
    """
    with suppress(OSError, ValueError), Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
