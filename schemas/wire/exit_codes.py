"""Exit codes of the engine and the gateway. The agent reads the engine's to decide whether a restart can help."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The reason why a process ended, as its exit status."""

    OK = 0
    """Asked to stop."""
    CRASHED = 1
    """An error of the program; the log says more."""
    UNUSABLE = 2
    """The configuration is wrong, or the model cannot be used: a restart does not help."""
    ADDRESS_IN_USE = 3
    """The address cannot be listened on; another port may work."""
    GROUP_LOST = 4
    """Another rank of the group is gone, so this rank ended too. Engines only."""
