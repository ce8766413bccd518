"""`override`, which Python 3.11 lacks, for modules that `fleetctl` imports at once: typing_extensions takes 7 ms."""

from typing import TYPE_CHECKING, Any

__all__ = ["override"]

if TYPE_CHECKING:
    from typing_extensions import override
else:

    def override(method: Any) -> Any:
        """Say that a method replaces one of a base class; only type checkers look."""
        return method
