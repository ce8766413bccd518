"""Checks of models: fetches from a hub that cannot go on by themselves, and files that interrupted ones left. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from insight.doctor.findings import Finding
from nodeagent.doctor.check import finding, listed, warn
from schemas import quantity
from schemas.node import Node
from schemas.quantity import counted

PARTIAL_FILES: Final = "partial-files"
"""The fix that deletes them."""
_MAX_NAMES: Final = 3
# Reasons of model reports that a person must act upon, or that may end by themselves (schemas/reasons).
_REMEDIES: Final = {
    "Gated": "accept the terms on the repository's page, as the account of the token",
    "Unauthorized": "create a token with the right to read the repository, and give it to the fleet",
    "NotFound": "compare the name and the revision with the hub's page; a private repository needs a token",
    "RateLimited": "it goes on by itself; a token or a mirror raises the limits",
    "SourceUnreachable": "check the Mac's connection, its proxy and the endpoint; it is retried",
    "ListingRefused": "choose a repository in MLX's format, or name its files",
    "HashMismatch": "retry once; if it happens again, the mirror, a proxy or the Mac's memory is faulty",
    "NoSpace": "free disk space on the Mac: remove models that no deployment uses",
    "NoPeer": "it goes on by itself once another Mac or the hub answers",
}
_PASSING: Final = ("RateLimited", "SourceUnreachable", "NoPeer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialFile:
    """A file of this machine that an interrupted download left, and that no download continues."""

    path: str
    size_bytes: int


def check_models(nodes: Sequence[Node], partial_files: Sequence[PartialFile]) -> Iterator[Finding]:
    """Yield the models that a hub refused, with its words, and the leftovers on this machine."""
    for node in nodes:
        for report in node.status.models if node.status is not None else ():
            if report.reason in _REMEDIES:
                yield finding(
                    "WARN" if report.reason in _PASSING else "FAIL",
                    f"model {report.path} is not there ({report.reason}): {report.message}",
                    _REMEDIES[report.reason],
                    node=node.name,
                )
    if partial_files:
        files = counted(len(partial_files), "file", "files")
        size = quantity.show(sum(file.size_bytes for file in partial_files))
        yield warn(
            f"{files} of interrupted downloads with {size}: {listed([file.path for file in partial_files], _MAX_NAMES)}",
            "`fleetctl doctor --fix` deletes them: nothing continues them",
            fix=PARTIAL_FILES,
        )
