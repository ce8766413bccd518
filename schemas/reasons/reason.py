"""The documentation of one reason: where it appears, what it means and what to do about it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A reason of a condition, an event or a rejection, as people look it up."""

    name: str
    title: str
    """The problem in eight words at most, to follow the name of the object; empty for events, and where nothing is wrong."""
    meaning: str
    cure: str
    """The remedy; empty for a reason that needs no action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonSection:
    """The reasons that appear in the same place."""

    title: str
    shown_by: str
    """Command that shows them."""
    reasons: tuple[Reason, ...]


def problem(name: str, title: str, meaning: str, cure: str) -> Reason:
    """Return a reason that needs an action, or says how the fleet helps itself."""
    return Reason(name=name, title=title, meaning=meaning, cure=cure)


def normal(name: str, meaning: str) -> Reason:
    """Return a reason that needs no action."""
    return Reason(name=name, title="", meaning=meaning, cure="")
