"""What keeps Macs from working as one. A value only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """One cable or setting that is not as it must be."""

    reason: str
    """For machines, such as "NoCable"."""
    message: str
    """For people: which cable or setting, where, and what to do."""
