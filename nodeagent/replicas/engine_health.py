"""The health of a running engine: faults for which the agent ends it and starts it again. Pure.

Faults of a rank end its epoch (epoch_health.py).
"""

from nodeagent.engines.health_client import FIRST_STEP_LIMIT_S
from nodeagent.replicas.observation import EngineFault, ObservedEngine
from schemas import quantity

SILENT_KILL_S = 60.0
# Reading a model over a network may pause for minutes, and kernels are compiled without progress.
_LOAD_STUCK_S = 600.0
# The other ranks of a group have loaded meanwhile, and wait.
_RANK_LOAD_STUCK_S = 120.0
# A later step may compile a kernel for a new shape, or read pages that were swapped out. With the time between two health
# questions, an engine is withdrawn within 30 s beyond its slowest step.
_STUCK_EXTRA_S = 25.0
# A stuck rank stops a whole group, so a rank gets less time; its first step has connected it and compiled its kernels.
_RANK_STUCK_S = 4.0
_RANK_STUCK_STEPS = 10.0
# A proof may be some percent too low (ProofCorrected tells it). Beyond that, other engines and the owner's programs
# are in danger. A peak of a moment is none.
_EXCESS_FACTOR = 1.5
_EXCESS_BYTES = 2**30
_EXCESS_S = 10.0


def excess_limit_bytes(proof_bytes: int) -> int:
    """Return the memory beyond which an engine with this proof is ended."""
    return int(proof_bytes * _EXCESS_FACTOR) + _EXCESS_BYTES


def find_fault(engine: ObservedEngine) -> EngineFault | None:
    """Return why a running engine must end; None if it may go on. A fault that was found before stays."""
    return engine.fault or memory_fault(engine) or _silence(engine) or _stuck_worker(engine)


def progress_limit_s(engine: ObservedEngine) -> float:
    """Return the time for which a busy engine may make no progress: the one rule for single engines and ranks.

    The first step reads cold pages, compiles kernels and connects RDMA; before it, no step tells how slow one may be.
    """
    is_rank = engine.rank is not None
    if engine.state == "Loading":
        return _RANK_LOAD_STUCK_S if is_rank else _LOAD_STUCK_S
    if engine.slowest_s == 0:
        return FIRST_STEP_LIMIT_S
    if is_rank:
        return max(_RANK_STUCK_S, _RANK_STUCK_STEPS * engine.slowest_s)
    return _STUCK_EXTRA_S + engine.slowest_s


def memory_fault(engine: ObservedEngine) -> EngineFault | None:
    """Return the fault of an engine that has used far more memory than its proof for a while."""
    if engine.excess_s <= _EXCESS_S:
        return None
    limit_bytes = excess_limit_bytes(engine.proof_bytes)
    return EngineFault(
        reason="MemoryExceeded",
        message=f"its engine used {quantity.show(engine.used_bytes)} for more than {_EXCESS_S:g} s; "
        f"{quantity.show(engine.proof_bytes)} are proven, and an engine is ended beyond {quantity.show(limit_bytes)}",
    )


def _silence(engine: ObservedEngine) -> EngineFault | None:
    if engine.silent_s <= SILENT_KILL_S:
        return None
    message = f"its engine did not answer for more than {SILENT_KILL_S:g} s"
    return EngineFault(reason="EngineSilent", message=message)


def _stuck_worker(engine: ObservedEngine) -> EngineFault | None:
    """Return the fault of an engine that answers health questions while its worker stands still."""
    limit_s = progress_limit_s(engine)
    if engine.stalled_s <= limit_s:
        return None
    if engine.state == "Loading":
        message = f"its engine loaded nothing for more than {limit_s:g} s"
        return EngineFault(reason="LoadStuck", message=message)
    slowest = f"{engine.slowest_s:.1f} s" if engine.slowest_s else "unknown"
    message = (
        f"its engine has work and made no progress for more than {limit_s:.1f} s; "
        f"its slowest step so far: {slowest}"
    )
    return EngineFault(reason="EngineStuck", message=message)
