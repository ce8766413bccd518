"""What one engine process was told on its command line. Values only; nothing here reads or decides."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One rank's orders, complete: no default is filled in after this point."""

    model_dir: Path
    replica: str
    replica_uid: str
    node: str
    served_names: tuple[str, ...]
    host: str
    port: int
    context_length: int
    concurrency: int
    queue_limit: int
    drain_timeout_s: float
    max_body_bytes: int
    blas_cache: Path
