"""The bytes of hub models that this node's store lacks, for the report that placement reads."""

from collections.abc import Iterable, Mapping

from models.model_store.admission import snapshot_missing_bytes
from models.model_store.store import ModelStore
from schemas.model_snapshot import ModelSnapshot
from schemas.node import ModelReport


def with_missing_bytes(
    reports: Iterable[ModelReport], snapshots: Mapping[str, ModelSnapshot], store: ModelStore
) -> tuple[ModelReport, ...]:
    """Return the reports of models with what a fetch of each would bring. Blocks on the disk.

    `snapshots` are those of hub models, by folder.
    """
    return tuple(
        report.model_copy(
            update={"missing_bytes": snapshot_missing_bytes(store, snapshots[report.path])}
        )
        if report.path in snapshots and report.geometry is not None
        else report
        for report in reports
    )
