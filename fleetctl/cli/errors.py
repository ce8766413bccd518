"""Errors that users read: what failed, where, and what to do. Never a traceback."""

import re

import click
from typing_extensions import override

from store.errors import (
    ConflictError,
    NoSpaceError,
    PermissionDeniedError,
    SlowStoreError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)

# `fleetctl` as the program of a command line, not as a part of a path.
_PROGRAM = re.compile(r"(?<![\w./-])fleetctl(?= )|fleetctl(?=\.fish)")


def with_program_name(text: str, program: str) -> str:
    """Return the text with the name that the program was called by, such as `mlx-fleet`, in its command lines."""
    return _PROGRAM.sub(lambda _: program, text)


def program_name() -> str:
    """Return the name that the program was called by, for command lines that it prints."""
    context = click.get_current_context(silent=True)
    return (context.find_root().info_name if context is not None else None) or "fleetctl"


class FleetctlError(click.ClickException):
    """A failure that ends the command; only its message is printed."""

    program = "fleetctl"
    """The name that the program was called by."""

    @override
    def show(self, file: object = None) -> None:
        click.echo(f"error: {with_program_name(self.format_message(), self.program)}", err=True)


class DiffError(FleetctlError):
    """A diff that failed. Exit code 2, because 1 means that there are differences."""

    exit_code = 2


class InterruptedByUser(FleetctlError):  # noqa: N818 - an interrupt is not an error
    """The user pressed Ctrl-C."""

    exit_code = 130


_START = (
    "Is the fleet up? `fleetctl up` starts a fleet on this machine; for another fleet, pass the "
    "address of its etcd with --etcd, FLEET_ETCD or a context (`fleetctl config`)"
)
_ADVICE: tuple[tuple[type[StoreError], str], ...] = (
    (
        SlowStoreError,
        "Its machine or its disk may be busy: try again in a minute",
    ),
    (UnauthenticatedError, "Pass --etcd-password-file, such as admin.env of `fleetctl init-auth`"),
    (
        PermissionDeniedError,
        "Run fleetctl as an administrator: with the identity that a token of `fleetctl token create --role admin` "
        "gives, or as fleet-admin (admin.env of `fleetctl init-auth`), with the --etcd-prefix of the fleet if it has one; restore, "
        "backup --etcd-snapshot and init-auth need root (root.env)",
    ),
    (ConflictError, "Another writer changed the object at the same time; run the command again"),
    (TooLargeError, "Make the object smaller: etcd accepts about 1 MiB"),
    (
        NoSpaceError,
        "`fleetctl up` frees space in its own etcd within seconds, or reports what it needs; for "
        "your own etcd see docs/operations/store.md",
    ),
)


def from_store_error(error: StoreError) -> FleetctlError:
    """Return the error that a user reads when the store failed, with advice."""
    is_absent = isinstance(error, UnavailableError) and error.absent
    advice = (
        _START
        if is_absent
        else next((text for kind, text in _ADVICE if isinstance(error, kind)), "")
    )
    sentence = str(error).rstrip(".")
    return FleetctlError(f"{sentence}. {advice}." if advice else sentence)
