"""The file fleet.yaml: the Macs and models of a simulated fleet. Estimates model shapes that the file leaves out.

Models of hubs that the file does not describe are looked up there: a few kilobytes of each, and no weights. They are
simulated as folders.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Self, cast

import orjson
from pydantic import Field, StringConstraints, model_validator

from insight.simulated_macs import FleetNode
from manifests import trees
from manifests.documents import Document
from manifests.errors import ManifestError, ManifestErrors
from manifests.load import LoadedObject, load_documents, read_model
from models import inspection
from models.hub.hub_settings import HubFactory, HubSettings
from reconciler.services.model_lookup import LOOKUP_ERRORS, look_up, reason_of
from schemas.deployment import HubReference, ModelDeployment, ModelSource
from schemas.meta import ApiModel, ModelPath
from schemas.node import ModelGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a model that determine its memory use."""

    layers: int
    kv_heads: int
    head_dim: int
    heads: int
    hidden_size: int
    ffn_size: int
    vocab_size: int = 151_936


# Billions of parameters, and the shape of a dense model with grouped attention of that size:
# Qwen 2.5 (0.5, 1.5, 14, 32), Llama 3 (3, 8, 70, 405), Mistral Large (123).
_SHAPES: Final = {
    0.5: ModelShape(layers=24, kv_heads=2, head_dim=64, heads=14, hidden_size=896, ffn_size=4864),
    1.5: ModelShape(layers=28, kv_heads=2, head_dim=128, heads=12, hidden_size=1536, ffn_size=8960),
    3.2: ModelShape(layers=28, kv_heads=8, head_dim=128, heads=24, hidden_size=3072, ffn_size=8192),
    8.0: ModelShape(layers=32, kv_heads=8, head_dim=128, heads=32, hidden_size=4096, ffn_size=14_336),
    14.0: ModelShape(layers=48, kv_heads=8, head_dim=128, heads=40, hidden_size=5120, ffn_size=13_824),
    32.0: ModelShape(layers=64, kv_heads=8, head_dim=128, heads=40, hidden_size=5120, ffn_size=27_648),
    70.0: ModelShape(layers=80, kv_heads=8, head_dim=128, heads=64, hidden_size=8192, ffn_size=28_672),
    123.0: ModelShape(layers=88, kv_heads=8, head_dim=128, heads=96, hidden_size=12_288, ffn_size=28_672),
    405.0: ModelShape(layers=126, kv_heads=8, head_dim=128, heads=128, hidden_size=16_384, ffn_size=53_248),
}  # fmt: skip

# mlx quantization stores a scale and a bias of 16 bits each for every 64 weights.
_SCALES_BITS = 0.5


def nearest_shape(parameters: int) -> ModelShape:
    """Return the shape of the well-known model with the nearest parameter count."""
    billions = parameters / 1e9
    nearest = min(_SHAPES, key=lambda size: abs(math.log(size / billions)))
    return _SHAPES[nearest]


def model_geometry(
    parameters: int, bits: int, shape: ModelShape, max_context: int | None
) -> ModelGeometry:
    """Return the geometry that an agent would report for such a model."""
    bits_per_weight = bits if bits >= 16 else bits + _SCALES_BITS
    return ModelGeometry(
        model_type="simulated",
        weights_bytes=int(parameters * bits_per_weight / 8),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        kv_element_bytes=2,
        vocab_size=shape.vocab_size,
        max_context=max_context,
        parameters=parameters,
        hidden_size=shape.hidden_size,
        ffn_size=shape.ffn_size,
        heads=shape.heads,
    )


_SCALES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


Parameters = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{1,15}(\.[0-9]{1,6})?[KMBT]?$", max_length=24)
]


class FleetModel(ApiModel):
    """One model: read from a folder on this machine, or described by its size."""

    path: ModelPath
    """Model path as in the deployment's spec.model.path, or the repository of its spec.model.hub."""
    dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder on this machine with the model in MLX format; give this or `parameters`."""
    parameters: Parameters | None = None
    """Number of parameters, such as "8B" or "70.6B"."""
    bits: Annotated[int, Field(ge=2, le=32)] = 4
    """Bits per weight."""
    layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Layers; default of this and the next fields: those of a well-known model of similar size."""
    kv_heads: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Key-value heads per layer."""
    head_dim: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Dimension of a head."""
    hidden_size: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Dimension of the hidden state."""
    max_context: Annotated[int, Field(ge=1)] | None = None
    """Longest supported context, in tokens; default: no limit."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.dir is None) == (self.parameters is None):
            raise ValueError(
                "needs either dir or parameters; write one of them, such as parameters: 8B"
            )
        described = self.model_fields_set - {"path", "dir"}
        if self.dir is not None and described:
            raise ValueError(
                f"has dir, which already defines {', '.join(sorted(described))}; remove one"
            )
        return self


class FleetFile(ApiModel):
    """A simulated fleet."""

    nodes: Annotated[tuple[FleetNode, ...], Field(min_length=1)]
    """The Macs."""
    models: tuple[FleetModel, ...] = ()
    """The models that deployments use."""


def read_fleet(path: str) -> tuple[FleetFile, Document]:
    """Read and validate a fleet file.

    Raises:
        ManifestErrors: all problems of the file, with their positions.

    """
    first, *more = load_documents([path])
    if more:
        hint = "Put all nodes into one list"
        raise ManifestErrors([more[0].problem((), "a fleet file is a single document", hint)])
    fleet = read_model(first, FleetFile)
    problems = [*_duplicate_errors(fleet, first), *_model_errors(fleet, first)]
    if problems:
        raise ManifestErrors(problems)
    return fleet, first


def geometries(fleet: FleetFile) -> dict[str, ModelGeometry]:
    """Return the geometries of the models, by path."""
    found = ((model.path, _read_geometry(model)) for model in fleet.models)
    return {path: geometry for path, geometry in found if isinstance(geometry, ModelGeometry)}


def check_models(loaded: Sequence[LoadedObject], fleet: FleetFile, source: str) -> None:
    """Refuse deployments whose model folder the fleet file does not describe; hubs describe their models.

    Raises:
        ManifestErrors: one problem per missing model, at its position.

    """
    known = {model.path for model in fleet.models}
    problems = [
        item.document.problem(
            ("spec", "model", *field),
            f"{source} does not describe this model",
            f'Add to its models: {{path: "{path}", parameters: {size}}}',
        )
        for item in loaded
        if isinstance(item.obj, ModelDeployment)
        for field, path, size in _models_of(item.obj.spec.model)
        if path not in known
    ]
    if problems:
        raise ManifestErrors(problems)


def _models_of(source: ModelSource) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the models of a deployment: field, path, and a plausible size for the hint."""
    if source.path is not None:
        yield ("path",), source.path, "8B"
    if source.draft is not None:
        yield ("draft", "path"), source.draft.path, "500M"


def _read_geometry(model: FleetModel) -> ModelGeometry | str:
    """Return the geometry of a model, or the reason why there is none."""
    if model.dir is not None:
        folder = Path(model.dir).expanduser().absolute()
        report = inspection.report_model(str(folder), folder, casts_to_float32=False)
        return report.geometry or report.message
    assert model.parameters is not None
    count = int(float(model.parameters.rstrip("KMBT")) * _SCALES.get(model.parameters[-1], 1))
    if not count:
        return "a model must have more than 0 parameters, such as 8B"
    usual = nearest_shape(count)
    shape = ModelShape(
        layers=model.layers or usual.layers,
        kv_heads=model.kv_heads or usual.kv_heads,
        head_dim=model.head_dim or usual.head_dim,
        heads=usual.heads,
        hidden_size=model.hidden_size or usual.hidden_size,
        ffn_size=usual.ffn_size,
    )
    return model_geometry(count, model.bits, shape, model.max_context)


def _duplicate_errors(fleet: FleetFile, document: Document) -> Iterator[ManifestError]:
    nodes, paths = set[str](), set[str]()
    for number, node in enumerate(fleet.nodes):
        duplicates = [name for name in node.names() if name in nodes]
        nodes.update(node.names())
        if duplicates:
            message = f"the node {duplicates[0]} is defined twice"
            yield document.problem(("nodes", number, "name"), message, "Give it another name")
    for number, model in enumerate(fleet.models):
        if model.path in paths:
            message = f"the model {model.path} is defined twice"
            yield document.problem(("models", number, "path"), message, "Remove one of them")
        paths.add(model.path)


def _model_errors(fleet: FleetFile, document: Document) -> Iterator[ManifestError]:
    for number, model in enumerate(fleet.models):
        geometry = _read_geometry(model)
        if isinstance(geometry, str):
            field = "dir" if model.dir is not None else "parameters"
            yield document.problem(("models", number, field), geometry)


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
