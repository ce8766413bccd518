"""Models of Ollama's MLX engine: one safetensors file for each tensor, which become the files that mlx-lm reads.

Ollama's store has `manifests/HOST/NAMESPACE/MODEL/TAG`, which list layers, and `blobs/sha256-HEX`. A quantized tensor is
`NAME.weight` with `.scale` and `.bias` after it; mlx-lm calls the last two `NAME.scales` and `NAME.biases`.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field, ValidationError

from models.hub.digests import BlobDigest, ContentHash, hash_file
from models.hub.file_selection import DEFAULT_PATTERNS, is_selected, path_problem
from models.hub.model_hub import check_repo, contents_version
from models.model_files import (
    LEAD_BYTES,
    MAX_CONFIG_BYTES,
    ModelUnusableError,
    header_length,
    parse_header,
)
from models.model_store.admission import disk_shortfall
from models.model_store.cache_import import ImportRefusedError, share_file
from models.model_store.gguf_import import import_gguf
from models.model_store.store import ModelStore, StoredModel
from models.safetensors_file import NewTensor, split_tensors, write_file

_TENSOR: Final = "application/vnd.ollama.image.tensor"
_JSON: Final = "application/vnd.ollama.image.json"
_GGUF: Final = "application/vnd.ollama.image.model"
_ADAPTER: Final = "application/vnd.ollama.image.adapter"
_LIBRARY: Final = "library"
_MAX_MANIFESTS: Final = 10_000
_MAX_MANIFEST_BYTES: Final = 16 << 20
_COPY_BYTES: Final = 1 << 20
# Bits, group size and mode of Ollama's names; a blob may state another group size.
_QUANTIZATIONS: Final = {
    "int4": (4, 32, "affine"),
    "int8": (8, 64, "affine"),
    "nvfp4": (4, 16, "nvfp4"),
    "mxfp4": (4, 32, "mxfp4"),
    "mxfp8": (8, 32, "mxfp8"),
}
_COMPANIONS: Final = {
    ".weight.scale": ".scales",
    ".weight.bias": ".biases",
    ".weight.global_scale": ".global_scale",
}


class _Layer(BaseModel):
    kind: str = Field(alias="mediaType")
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0)
    name: str = ""


class _Manifest(BaseModel):
    layers: list[_Layer] = Field(max_length=50_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaModel:
    """One tag in Ollama's store."""

    name: str
    """The name in Ollama, such as "qwen3:8b"."""
    repo: str
    """The name in the fleet: "ollama/qwen3-8b", or NAMESPACE/MODEL-TAG for a namespace of its own."""
    blobs: Path
    layers: tuple[_Layer, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its weights."""
        return sum(layer.size for layer in self.layers if layer.kind in (_TENSOR, _GGUF))

    @property
    def problem(self) -> str:
        """Return why it cannot be imported; "" if nothing is known against it."""
        kinds = [layer.kind for layer in self.layers]
        if kinds.count(_GGUF) > 1 or (_GGUF in kinds and _ADAPTER in kinds):
            return "it is put together of several GGUF files: import its base, and serve the adapter beside it"
        if _TENSOR not in kinds and _GGUF not in kinds:
            return "it has no weights"
        if _GGUF not in kinds and not any(
            layer.kind == _JSON and layer.name == "config.json" for layer in self.layers
        ):
            return "it has no config.json: it is no language model"
        try:
            check_repo(self.repo)
        except ValueError as error:
            return str(error)
        return ""

    def blob(self, layer: _Layer) -> Path:
        """Return the file of a layer."""
        return self.blobs / layer.digest.replace(":", "-")


def find_ollama_models(root: Path) -> tuple[OllamaModel, ...]:
    """Return the models of a store, sorted by name; a manifest that cannot be read is left out."""
    found = []
    for number, path in enumerate(root.glob("manifest*/*/*/*/*")):
        if number >= _MAX_MANIFESTS:
            break
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                continue
            manifest = _Manifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue
        namespace, model, tag = path.parts[-3:]
        of = "" if namespace == _LIBRARY else f"{namespace}/"
        found.append(
            OllamaModel(
                name=f"{of}{model}:{tag}",
                repo=f"{namespace if of else 'ollama'}/{model}"
                + ("" if tag == "latest" else f"-{tag}"),
                blobs=root / "blobs",
                layers=tuple(manifest.layers),
            )
        )
    return tuple(sorted(found, key=lambda one: one.name))


def import_ollama_model(store: ModelStore, model: OllamaModel) -> StoredModel:
    """Write a model's tensors into files that mlx-lm reads; return the model. Ollama's store stays as it is.

    A GGUF file is converted (`import_gguf` has the errors). The weights are copied, because the tensors get other names. Every byte is compared with Ollama's digests.

    Raises:
        ImportRefusedError: a layer is damaged or absent, the disk has no room, or it is no model for mlx-lm.
        OSError: the disk failed.

    """
    if model.problem:
        raise ImportRefusedError(f"{model.name}: {model.problem}")
    for layer in model.layers:
        if layer.kind == _GGUF:
            _check_layer(model, layer)
            return import_gguf(store, model.blob(layer), model.repo)
    store.prepare()
    try:
        shortfall = disk_shortfall(
            free_bytes=shutil.disk_usage(store.root).free,
            reserve_bytes=store.reserve_bytes,
            missing_bytes=model.size_bytes,
        )
        if shortfall:
            raise ImportRefusedError(
                f"{model.name}: its tensors must be copied, and the disk of {store.root} lacks {shortfall} bytes for them"
            )
        tensors, quantization = _plan(model)
        files = dict(_import_configs(store, model, quantization))
        for name, part in split_tensors(tensors).items():
            files[name] = _assemble(store, model, part)
    except ModelUnusableError as error:
        raise ImportRefusedError(f"{model.name}: {error}") from error
    return store.publish(model.repo, contents_version(files), files, DEFAULT_PATTERNS)


def _plan(model: OllamaModel) -> tuple[list[NewTensor], dict[str, Any]]:
    """Return all tensors, and the most frequent quantization as in a config.json; {} if there is none."""
    tensors: dict[str, NewTensor] = {}
    seen: dict[tuple[int, int, str], int] = {}
    for layer in model.layers:
        if layer.kind != _TENSOR or layer.name.startswith("draft."):
            continue
        _check_layer(model, layer)
        found, metadata = _read_blob(model.blob(layer))
        if layer.name not in {tensor.name for tensor in found}:
            raise ImportRefusedError(
                f"{model.name}: its layer {layer.name} has several tensors, as for a mixture of experts, in an order "
                "that mlx-lm does not know: pull a conversion of the model to MLX, such as one of mlx-community"
            )
        tensors |= {_mlx_name(tensor.name): tensor for tensor in found}
        if kind := metadata.get("quant_type", "").lower():
            known = _quantization(model, kind, metadata.get("group_size", ""))
            seen[known] = seen.get(known, 0) + 1
    named = [replace(tensor, name=name) for name, tensor in sorted(tensors.items())]
    if not seen:
        return named, {}
    bits, group_size, mode = max(seen, key=lambda key: seen[key])
    return named, {"bits": bits, "group_size": group_size, "mode": mode}


def _quantization(model: OllamaModel, kind: str, group_size: str) -> tuple[int, int, str]:
    if kind not in _QUANTIZATIONS or (group_size and not group_size.isdecimal()):
        raise ImportRefusedError(
            f"{model.name}: its weights are packed as {kind[:40]!r}; known are {', '.join(_QUANTIZATIONS)}"
        )
    bits, usual, mode = _QUANTIZATIONS[kind]
    return bits, int(group_size[:6] or usual), mode


def _check_layer(model: OllamaModel, layer: _Layer) -> None:
    """Compare a layer with its digest."""
    try:
        digest = hash_file(model.blob(layer)).sha256
    except FileNotFoundError as error:
        raise ImportRefusedError(
            f"{model.name}: {layer.name} is not there: run `ollama pull {model.name}` first"
        ) from error
    if str(digest) != layer.digest:
        raise ImportRefusedError(
            f"{model.name}: {layer.name} is damaged: its content is {digest}, the manifest says {layer.digest}; "
            f"run `ollama rm {model.name}` and pull it again"
        )


def _read_blob(path: Path) -> tuple[list[NewTensor], dict[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = header_length(file.read(LEAD_BYTES), path, size)
        raw = file.read(length)
    tensors = [
        NewTensor(
            name=name,
            dtype=header.dtype,
            shape=header.shape or (),
            size=header.size,
            read=partial(_pieces, path, LEAD_BYTES + length + header.data_offsets[0], header.size),
        )
        for name, header in parse_header(raw, path, size).items()
    ]
    metadata = json.loads(raw).get("__metadata__") or {}
    return tensors, {str(key): str(value) for key, value in metadata.items()}


def _mlx_name(name: str) -> str:
    for suffix, other in _COMPANIONS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + other
    return name


def _assemble(store: ModelStore, model: OllamaModel, tensors: list[NewTensor]) -> BlobDigest:
    """Write one safetensors file into the store; return its digest."""
    making = store.incoming / f"ollama.{os.getpid()}.import"
    making.unlink(missing_ok=True)
    content_hash = ContentHash(size=0, algorithm="sha256")
    write_file(making, tensors, f"ollama:{model.name}", content_hash.update)
    store.add_blob(making, content_hash.sha256, content_hash.sha256)
    return content_hash.sha256


def _pieces(blob: Path, start: int, left: int) -> Iterator[bytes]:
    with blob.open("rb") as file:
        file.seek(start)
        while left and (piece := file.read(min(left, _COPY_BYTES))):
            left -= len(piece)
            yield piece
    if left:
        raise ImportRefusedError(f"{blob} became shorter while it was read")


def _import_configs(
    store: ModelStore, model: OllamaModel, quantization: dict[str, Any]
) -> Iterator[tuple[str, BlobDigest]]:
    """Yield the JSON files; config.json gets the quantization that the blobs state."""
    for layer in model.layers:
        name = layer.name
        is_wanted = layer.kind == _JSON and "/" not in name and is_selected(name, DEFAULT_PATTERNS)
        # The tensors are in other files than the index of the original says.
        if not is_wanted or path_problem(name) or name.endswith(".safetensors.index.json"):
            continue
        _check_layer(model, layer)
        making = store.incoming / f"ollama.{os.getpid()}.import"
        making.unlink(missing_ok=True)
        if name == "config.json" and quantization:
            making.write_bytes(_with_quantization(model, layer, quantization))
        else:
            share_file(model.blob(layer), making)
        digest = hash_file(making).sha256
        store.add_blob(making, digest, digest)
        yield name, digest


def _with_quantization(model: OllamaModel, layer: _Layer, quantization: dict[str, Any]) -> bytes:
    path = model.blob(layer)
    if layer.size > MAX_CONFIG_BYTES:
        raise ImportRefusedError(f"{model.name}: config.json has {layer.size} bytes")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ImportRefusedError(f"{model.name}: config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ImportRefusedError(f"{model.name}: config.json is no object")
    config.pop("quantization_config", None)
    return json.dumps({**config, "quantization": quantization}, indent=2).encode()
