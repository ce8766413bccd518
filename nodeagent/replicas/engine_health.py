"""The health of a running engine: faults for which the agent ends it and starts it again. Pure.

Faults of a rank end its epoch (epoch_health.py).
"""

from nodeagent.replicas.observation import EngineFault, ObservedEngine
from schemas import quantity

SILENT_KILL_S = 60.0
# Reading a model over a network may pause for minutes, and kernels are compiled without progress.
_LOAD_STUCK_S = 600.0
# A proof may be some percent too low (ProofCorrected tells it). Beyond that, other engines and the owner's programs
# are in danger. A peak of a moment is none.
_EXCESS_FACTOR = 1.5
_EXCESS_BYTES = 2**30
_EXCESS_S = 10.0


def excess_limit_bytes(proof_bytes: int) -> int:
    """Return the resident memory beyond which an engine with this proof is ended."""
    return int(proof_bytes * _EXCESS_FACTOR) + _EXCESS_BYTES


def find_fault(engine: ObservedEngine) -> EngineFault | None:
    """Return why a running engine must end; None if it may go on. A fault that was found before stays."""
    return engine.fault or memory_fault(engine) or _silence(engine) or _stuck_load(engine)


def memory_fault(engine: ObservedEngine) -> EngineFault | None:
    """Return the fault of an engine that has used far more memory than its proof for a while."""
    if engine.excess_s <= _EXCESS_S:
        return None
    limit_bytes = excess_limit_bytes(engine.proof_bytes)
    return EngineFault(
        reason="MemoryExceeded",
        message=f"its engine used {quantity.show(engine.resident_bytes)} for more than {_EXCESS_S:g} s; "
        f"{quantity.show(engine.proof_bytes)} are proven, and an engine is ended beyond {quantity.show(limit_bytes)}",
    )


def _silence(engine: ObservedEngine) -> EngineFault | None:
    if engine.silent_s <= SILENT_KILL_S:
        return None
    message = f"its engine did not answer for more than {SILENT_KILL_S:g} s"
    return EngineFault(reason="EngineSilent", message=message)


def _stuck_load(engine: ObservedEngine) -> EngineFault | None:
    if engine.load_stalled_s <= _LOAD_STUCK_S:
        return None
    message = f"its engine loaded nothing for more than {_LOAD_STUCK_S:g} s"
    return EngineFault(reason="LoadStuck", message=message)
