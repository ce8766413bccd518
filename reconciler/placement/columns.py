"""Columns of the node table: the properties of a node that a check or score depends on. Pure.

Nodes with equal values in a column get the same answer from every function that depends only on that column, so the
table calls the function once for all of them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from reconciler.placement.inputs import NodeView
from schemas.deployment import ModelSource


@dataclass(frozen=True, slots=True)
class FieldColumn:
    """One field of a node."""

    field: str


@dataclass(frozen=True, slots=True)
class LabelsColumn:
    """The node's values of these labels."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelColumn:
    """The node's report on a model."""

    path: str


@dataclass(frozen=True, slots=True)
class AdapterColumn:
    """The node's report on an adapter."""

    path: str


Column: TypeAlias = FieldColumn | LabelsColumn | ModelColumn | AdapterColumn


class ColumnPair(NamedTuple):
    """Two columns together; the first may be a pair itself."""

    one: "Column | ColumnPair"
    other: Column


AnyColumn: TypeAlias = Column | ColumnPair


NAME = FieldColumn("name")
READY = FieldColumn("is_ready")
CORDONED = FieldColumn("is_cordoned")
HOLDS = FieldColumn("holds")
GROUP = FieldColumn("reserved_by_group")
POOLS = FieldColumn("pools")
CHIP = FieldColumn("chip")
GPU_CORES = FieldColumn("gpu_cores")
ALLOCATABLE = FieldColumn("allocatable_bytes")
TAINTS = FieldColumn("taints")
BANDWIDTH = FieldColumn("bandwidth_gbps")
POOL_PRIORITY = FieldColumn("pool_priority")
HARDWARE = FieldColumn("hardware")


def source_columns(source: ModelSource) -> tuple[Column, ...]:
    """Return the columns of all folders that a model is read from, its own first."""
    paths = [source.folder] if source.draft is None else [source.folder, source.draft.path]
    return (*map(ModelColumn, paths), *map(AdapterColumn, source.adapter_paths))


def read_column(column: Column, nodes: Sequence[NodeView]) -> list[Hashable]:
    """Return the nodes' values in the column."""
    match column:
        case FieldColumn(field):
            return [getattr(node, field) for node in nodes]
        case LabelsColumn(keys):
            return [tuple([node.labels.get(key) for key in keys]) for node in nodes]
        case ModelColumn(path):
            return [node.models.get(path) for node in nodes]
        case AdapterColumn(path):
            return [node.adapters.get(path) for node in nodes]
