"""What an engine was seen to take, held against its memory proof. Pure."""

from collections.abc import Sequence
from typing import Final

from schemas import quantity
from schemas.replica import MemoryProof, RankAssignment, RankStatus, Replica

# A proof is an estimate; within this nobody has to do anything.
_PERCENT: Final = 15
_GIB: Final = 2**30


def percent_over(memory: MemoryProof, peak_bytes: int) -> int:
    """Return by how many percent the peak is above the proof; less than 0 where it is below."""
    return round(100 * (peak_bytes - memory.total_bytes) / max(1, memory.total_bytes))


def corrections(replica: Replica, reports: Sequence[RankStatus | None]) -> str:
    """Return what to say of the ranks that took much more than was proven; empty if none did."""
    pairs = zip(replica.spec.ranks, reports, strict=True)
    said = (_correction(replica, assigned, report) for assigned, report in pairs)
    return "; ".join(one for one in said if one)


def _correction(replica: Replica, assigned: RankAssignment, rank: RankStatus | None) -> str:
    memory, node = assigned.memory, assigned.node
    if rank is None or percent_over(memory, rank.peak_bytes) <= _PERCENT:
        return ""
    show, peak = quantity.show, rank.peak_bytes
    what = "spec.resources.memory says" if memory.overridden else "its memory proof says"
    return (
        f"{replica.name} took {show(peak)} on {node}, {percent_over(memory, peak)} % more than the "
        f"{show(memory.total_bytes)} that {what}. {show(peak)} count on {node} from now on; set "
        f"spec.resources.memory to {-(-peak // _GIB)}Gi, so that new replicas are placed with that as well"
    )


def comparison(memory: MemoryProof, peak_bytes: int) -> str:
    """Return how a peak compares with the proof, in a few words; empty if nobody measured."""
    if not peak_bytes:
        return ""
    over = percent_over(memory, peak_bytes)
    if over > _PERCENT:
        return f"{over} % more than proven: the measured figure counts"
    if over < -_PERCENT:
        return (
            f"{-over} % less than proven: the proof counts, for caches may not have been full yet"
        )
    return "as proven"
