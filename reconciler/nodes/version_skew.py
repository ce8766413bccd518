"""Version skew: which parts of a fleet must be upgraded, in the words that conditions, doctor and fleetctl show. Pure."""

from dataclasses import dataclass
from typing import Final

from machinery.version import is_compatible, parse_release

MLX_LM: Final = "0.32"
"""The mlx-lm that the memory rules were tested with (pyproject.toml pins it, models/cache_rules.py has them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedPart:
    """One part of a fleet and its version."""

    label: str
    """Such as `gateway g`, or `its agent` in a message of the node."""
    version: str
    upgrade: str = ""
    """The part to upgrade; the label if empty."""


def skew_text(part: VersionedPart, other: VersionedPart) -> str:
    """Describe how far two parts are apart, and which one to upgrade; empty if they may work together."""
    theirs, ours = parse_release(part.version), parse_release(other.version)
    if theirs is None or ours is None or is_compatible(part.version, other.version):
        return ""  # a checkout and a foreign program have no release
    older = part if theirs < ours else other
    return (
        f"{part.label} is {part.version}, {other.label} is {other.version}; they may differ by one minor version: "
        f"upgrade {older.upgrade or older.label}"
    )


def mlx_skew_text(label: str, version: str) -> str:
    """Describe how an mlx-lm differs from the tested version; empty if it does not, or is unknown."""
    theirs = parse_release(version)
    if theirs is None or theirs == parse_release(MLX_LM):
        return ""
    return (
        f"{label} is {version}, memory proofs were tested with {MLX_LM}: install mlx-lm {MLX_LM} there. Until then "
        "replicas may take more memory than proven"
    )
