"""Status of a Mac that does not exist, as its agent would report it. Imports no part of the agent that runs."""

from machinery.version import version
from nodeagent.hardware.macos import gpu_memory_limit
from schemas import chips
from schemas.meta import Labels
from schemas.node import NodeStatus


def hollow_status(
    name: str,
    *,
    chip: str = "Apple M4 Pro",
    memory_bytes: int = 48 * 2**30,
    gpu_cores: int | None = None,
    labels: Labels | None = None,
    allocatable_bytes: int | None = None,
) -> NodeStatus:
    """Return the status of a simulated Mac; missing values are those of the chip's usual model."""
    row = chips.find_chip(chip, gpu_cores=gpu_cores, memory_bytes=memory_bytes)
    cores = gpu_cores if gpu_cores is not None else (row.gpu_cores[-1] if row is not None else 0)
    usual_bytes, _ = gpu_memory_limit(memory_bytes, None)
    return NodeStatus(
        uid=f"hollow-{name}",
        hostname=name,
        address="127.0.0.1",
        agent_version=version(),
        os="macOS",
        os_version="26.2",
        machine="hollow",
        chip=chip,
        cpu_cores=row.cpu_cores[-1] if row is not None else 1,
        gpu_cores=cores,
        memory_bytes=memory_bytes,
        allocatable_bytes=usual_bytes if allocatable_bytes is None else allocatable_bytes,
        labels=labels or {},
    )
