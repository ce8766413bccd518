"""`override` for modules that `fleetctl` imports at its start: Python 3.11 lacks it, and typing_extensions takes 7 ms."""

from typing import TYPE_CHECKING, Any

__all__ = ["override"]

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method: Any) -> Any:
        """Mark a method as an override of its base class; only type checkers read the mark."""
        return method
