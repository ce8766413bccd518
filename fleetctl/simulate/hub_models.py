"""Models of hubs in a simulation: inspected at the hub or described by fleet.yaml, then simulated as folders.

A few kilobytes are read of each, and no weights.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import orjson

from manifests import trees
from manifests.errors import ManifestErrors
from manifests.load import LoadedObject
from models import inspection
from models.hub.hub_settings import HubFactory, HubSettings
from reconciler.services.model_lookup import LOOKUP_ERRORS, look_up, reason_of
from schemas.deployment import HubReference, ModelDeployment
from schemas.node import ModelGeometry

# Nothing is below it: only what the hub says counts.
_NO_FOLDER: Final = Path(os.devnull)
_HINT: Final = (
    "The hub was asked without a token. To simulate without it, describe the model in fleet.yaml: "
    '{{path: "{repo}", parameters: 8B}}'
)


async def hub_geometries(
    loaded: Sequence[LoadedObject], described: Mapping[str, ModelGeometry], hubs: HubSettings
) -> dict[str, ModelGeometry]:
    """Return the geometries of all hub models, by their path in the simulation.

    Those in `described`, by repository, are taken from there; hubs are asked for the others, without a token.

    Raises:
        ManifestErrors: a hub does not tell; each problem is at the place of its model.

    """
    model_geometries: dict[str, ModelGeometry] = {}
    problems = []
    wanted = []
    for item in loaded:
        source = item.obj.spec.model.hub if isinstance(item.obj, ModelDeployment) else None
        if source is not None and source.repo in described:
            model_geometries[_path(source)] = described[source.repo]
        elif source is not None:
            wanted.append((item, source))
    if wanted:
        async with hubs.open() as factory:
            for item, source in wanted:
                assert isinstance(item.obj, ModelDeployment)
                geometry = await _look_up(item.obj, factory, hubs)
                if isinstance(geometry, ModelGeometry):
                    model_geometries[_path(source)] = geometry
                else:
                    hint = _HINT.format(repo=source.repo)
                    problems.append(item.document.problem(("spec", "model", "hub"), geometry, hint))
    if problems:
        raise ManifestErrors(problems)
    return model_geometries


async def _look_up(
    deployment: ModelDeployment, factory: HubFactory, hubs: HubSettings
) -> ModelGeometry | str:
    """Return the geometry of the deployment's model, or why there is none."""
    source = deployment.spec.model.hub
    assert source is not None
    endpoint, now = hubs.endpoint_of(source), datetime.fromtimestamp(0, tz=UTC)
    try:
        snapshot = await look_up(factory(source, ""), deployment, endpoint=endpoint, now=now)
    except LOOKUP_ERRORS as error:
        return ": ".join(reason_of(error))
    (report,) = inspection.report_models(
        (), _NO_FOLDER, casts_to_float32=False, snapshots={snapshot.folder: snapshot}
    )
    return report.geometry or f"{report.reason}: {report.message}"


def as_folders(loaded: Sequence[LoadedObject]) -> list[LoadedObject]:
    """Return the manifests with a folder in the place of each hub model; simulated Macs fetch nothing."""
    return [
        replace(item, obj=_as_folder(item.obj)) if isinstance(item.obj, ModelDeployment) else item
        for item in loaded
    ]


def _as_folder(deployment: ModelDeployment) -> ModelDeployment:
    hub = deployment.spec.model.hub
    if hub is None:
        return deployment
    tree = trees.declared_tree(deployment)
    spec = cast("dict[str, Any]", tree["spec"])
    spec.pop("preload", None)
    del spec["model"]["hub"]
    spec["model"]["path"] = _path(hub)
    return ModelDeployment.model_validate_json(orjson.dumps(tree))


def _path(source: HubReference) -> str:
    return f"{source.repo}@{source.revision}"
