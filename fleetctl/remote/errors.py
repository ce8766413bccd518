"""Errors of sessions with other Macs, named after what the user has to mend."""

from fleetctl.cli.errors import FleetctlError


class RemoteError(FleetctlError):
    """A step on another Mac that failed; the message names the Mac and says what to do."""


class UnreachableHostError(RemoteError):
    """No ssh server answers at the address, or the connection broke. The same command may succeed later."""


class HostKeyError(RemoteError):
    """The host key is unknown, changed or revoked. No credentials were sent."""


class LoginRefusedError(RemoteError):
    """The ssh server refuses the user's keys and password."""


class SudoRefusedError(RemoteError):
    """The user may not become root on the Mac, or the password is wrong."""


class RemoteTimeoutError(RemoteError):
    """A command did not end in time; it was killed."""
