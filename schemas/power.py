"""Sleep and wake of Macs: the leader's order for one agent, and the hours in which a model is used."""

from datetime import datetime
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from schemas.meta import ApiModel, ObjectName

HOURS_OF_WEEK: Final = 168
HARDWARE_ADDRESS: Final = r"^[0-9a-f]{2}(:[0-9a-f]{2}){5}$"
_Address = Annotated[str, StringConstraints(max_length=15)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class WakePacket(ApiModel):
    """One magic packet."""

    hardware_address: Annotated[str, StringConstraints(pattern=HARDWARE_ADDRESS)]
    """The MAC address of an interface of the Mac that sleeps."""
    broadcast: _Address
    """The broadcast address of the network that both Macs are in."""


class WakeRequest(ApiModel):
    """The request to wake another Mac."""

    node: ObjectName
    attempt: Annotated[int, Field(ge=1)]
    """Each attempt is sent once."""
    requested_at: datetime
    """The time of the first attempt."""
    packets: Annotated[tuple[WakePacket, ...], Field(min_length=1, max_length=16)]


class PowerOrder(ApiModel):
    """The value of `power/<node>/order`, which the leading reconciler writes for that node's agent."""

    sleep: bool = False
    """True while the Mac should sleep; an agent that wakes up while it is True goes back to sleep."""
    wakes: Annotated[tuple[WakeRequest, ...], Field(max_length=1000)] = ()
    """Macs that this one wakes."""


class DemandWeek(ApiModel):
    """The value of `demandweek/<deployment>`: how often each hour of the week had requests; hour 0 is Monday, 0:00 UTC."""

    shares: Annotated[
        tuple[_Share | None, ...], Field(min_length=HOURS_OF_WEEK, max_length=HOURS_OF_WEEK)
    ]
    """For each hour a mean over the weeks, in which the last week counts half; None before the first."""
