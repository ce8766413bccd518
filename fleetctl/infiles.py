"""`-f` of verbs that only look: which objects the manifests name. Imports every model there is."""

import sys
from collections.abc import Sequence

from fleetctl.errors import FleetctlError
from fleetctl.kinds import Target
from manifests.errors import ManifestErrors
from manifests.load import load_objects
from schemas import kinds


def targets_of(files: Sequence[str], *, recursive: bool) -> tuple[Target, ...]:
    """Return the objects that are in the files, by kind, each kind's in their order.

    Raises:
        FleetctlError: a file cannot be read, or there is something wrong in it.

    """
    try:
        loaded = load_objects(files, recursive=recursive, stdin=sys.stdin.buffer)
    except ManifestErrors as error:
        raise FleetctlError(str(error)) from error
    names: dict[str, list[str]] = {}
    for item in loaded:
        names.setdefault(item.obj.kind, []).append(item.obj.name)
    found = [(kinds.by_name(kind), tuple(some)) for kind, some in names.items()]
    return tuple(Target(kind=kind, names=some) for kind, some in found if kind is not None)
