"""Folders of models that no hub filled, as each Mac reports them: for `fleetctl models list`. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas import quantity
from store.object_trees import Tree, name_of

TITLES = ("NODE", "FOLDER", "SIZE", "STATE", "USED BY")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """One folder on one Mac."""

    node: str
    path: str
    """As the deployments write it."""
    weights_bytes: int | None
    """None if the Mac cannot use it."""
    problem: str
    """The reason for which it cannot; empty if it can."""
    used_by: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table."""
        size = "-" if self.weights_bytes is None else quantity.show(self.weights_bytes)
        state = "present" if self.weights_bytes is not None else self.problem or "unknown"
        return self.node, self.path, size, state, ",".join(self.used_by) or "-"

    def tree(self) -> dict[str, Any]:
        """Return the folder as an object of JSON."""
        return {
            "path": self.path,
            "weightsBytes": self.weights_bytes,
            "problem": self.problem,
            "usedBy": list(self.used_by),
        }


def model_folders(
    nodes: Iterable[Tree], deployments: Iterable[Tree], names: Sequence[str]
) -> list[ModelFolder]:
    """Return the folders on these nodes, on all without names: first those that deployments name in spec.model.path."""
    users: dict[str, list[str]] = {}
    for deployment in deployments:
        path = deployment["spec"]["model"].get("path")
        if path:
            users.setdefault(path, []).append(f"modeldeployment/{name_of(deployment)}")
    folders: list[ModelFolder] = []
    for node in sorted(nodes, key=name_of):
        if names and name_of(node) not in names:
            continue
        status = node.get("status") or {}
        reports = sorted(status.get("models") or (), key=lambda one: str(one["path"]))
        folders += [
            _folder(name_of(node), report, users[report["path"]])
            for report in reports
            if report["path"] in users
        ]
        folders += [
            ModelFolder(
                node=name_of(node),
                path=str(local["path"]),
                weights_bytes=int(local["weightsBytes"]),
                problem="",
                used_by=(),
            )
            for local in status.get("localModels") or ()
            if local["path"] not in users
        ]
    return folders


def _folder(node: str, report: Mapping[str, Any], users: Sequence[str]) -> ModelFolder:
    geometry = report.get("geometry")
    return ModelFolder(
        node=node,
        path=str(report["path"]),
        weights_bytes=None if geometry is None else int(geometry["weightsBytes"]),
        problem=str(report.get("message") or report.get("reason") or ""),
        used_by=tuple(sorted(users)),
    )
