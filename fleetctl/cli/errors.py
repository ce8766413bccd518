"""From exceptions to what a user reads: what was wrong, where, and what to do. No tracebacks."""

import click

from machinery.typing_compat import override
from store.errors import (
    ConflictError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)


class FleetctlError(click.ClickException):
    """A refusal: its message is all that is shown."""

    @override
    def show(self, file: object = None) -> None:
        click.echo(f"error: {self.format_message()}", err=True)


class DiffError(FleetctlError):
    """A diff that could not be made: 1 would say that there are differences."""

    exit_code = 2


class InterruptedByUser(FleetctlError):  # noqa: N818 - nothing went wrong
    """The user pressed Ctrl-C."""

    exit_code = 130


_ADVICE: tuple[tuple[type[StoreError], str], ...] = (
    (
        UnavailableError,
        "Is the fleet up? `fleetctl up` starts one on this machine; for another one say where its "
        "etcd is with --etcd, FLEET_ETCD or a context (`fleetctl config`)",
    ),
    (UnauthenticatedError, "Give --etcd-password-file, such as admin.env of `fleetctl init-auth`"),
    (
        PermissionDeniedError,
        "fleetctl works as fleet-admin (admin.env of `fleetctl init-auth`), with the fleet's "
        "--etcd-prefix if it has one; restore, backup --etcd-snapshot and init-auth need root (root.env)",
    ),
    (ConflictError, "Somebody else wrote at the same time; run the command again"),
    (TooLargeError, "Make the object smaller: etcd takes about 1 MiB"),
    (
        NoSpaceError,
        "`fleetctl up` frees space in its own etcd within seconds, or says what else is needed; for "
        "an etcd of your own see docs/operations/store.md",
    ),
)


def from_store_error(error: StoreError) -> FleetctlError:
    """Return what a user reads when the store failed."""
    advice = next((text for kind, text in _ADVICE if isinstance(error, kind)), "")
    sentence = str(error).rstrip(".")
    return FleetctlError(f"{sentence}. {advice}." if advice else sentence)
