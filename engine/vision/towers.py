"""Towers of mlx-vlm, one entry a family: sizes of images, the words around them, and their rows. Worker thread only.

Families differ in how they cut an image, and agree in what follows: some rows of numbers that replace the embeddings of
the image's tokens.
"""

import importlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import mlx.core as mx
import numpy as np

from engine.jobs import MediaInput
from engine.vision.image_reader import ImageRules, MarkerRules, Sizing
from models.model_files import ModelUnusableError
from schemas.vision import Vision

Array: TypeAlias = Any  # mlx ships no types
Pixels: TypeAlias = np.ndarray[Any, Any]

# Of OpenAI's CLIP, which Qwen's preprocessor_config.json repeats.
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 14 * 14 * 4 * 1280
_LONGEST_EDGE: Final = 1_540  # of Pixtral
_MAX_FILE_BYTES: Final = 1 << 20  # the files of published models have at most 3 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """The conversion of pixels to the input of a tower."""

    patch: int
    merge: int
    frames: int = 2
    """An image is repeated to so many frames, as models of videos want it."""
    mean: tuple[float, ...] = _MEAN
    deviation: tuple[float, ...] = _DEVIATION

    def scaled(self, image: MediaInput) -> Pixels:
        """Return the pixels of an image, or its frames', in the tower's range: (frames * height, width, 3)."""
        pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(-1, image.width, 3)
        scaled: Pixels = (pixels.astype(np.float32) / 255.0 - self.mean) / self.deviation
        return scaled.astype(np.float32)

    def patches(self, image: MediaInput) -> Pixels:
        """Return the patches of an image, one a row, in the order in which the model merges them."""
        side, merge = self.patch, self.merge
        rows, columns = image.height // (side * merge), image.width // (side * merge)
        parts = self.scaled(image).reshape(-1, rows, merge, side, columns, merge, side, 3)
        # Blocks, patches of a block, color, frame, y, x.
        parts = parts.transpose(1, 4, 2, 5, 7, 0, 3, 6)
        parts = np.repeat(parts, self.frames // parts.shape[5], axis=5)
        return parts.reshape(rows * columns * merge * merge, -1)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The output of a tower for the images of a prompt: one row for each of their tokens, in order."""

    embeddings: Array
    """Of shape (tokens, width): they replace the embeddings of the tokens."""
    layers: tuple[Array, ...] = ()
    """Of the same shape, one for each of the first layers, after which it is added (Qwen3-VL's deepstack)."""


Encode: TypeAlias = Callable[[Any, Sequence[MediaInput], Preprocessing], ImageRows]


def _encode_patches(inner: Any, images: Sequence[MediaInput], how: Preprocessing) -> ImageRows:
    """Encode images whose patches come in blocks to be merged: Qwen, GLM."""
    patches = mx.array(np.concatenate([how.patches(image) for image in images]))
    grids = [[1, image.height // how.patch, image.width // how.patch] for image in images]
    dtype = inner.vision_tower.patch_embed.proj.weight.dtype
    made = inner.vision_tower(patches.astype(dtype), mx.array(grids), output_hidden_states=False)
    rows, layers = made if isinstance(made, tuple) else (made, ())
    return ImageRows(rows, tuple(layers))


def _encode_square(inner: Any, images: Sequence[MediaInput], how: Preprocessing) -> ImageRows:
    """Encode images of one size: Gemma 3. Its language model multiplies embeddings, and rows are not to be."""
    dtype = inner.vision_tower.vision_model.embeddings.patch_embedding.weight.dtype
    scale = inner.config.text_config.hidden_size**0.5
    made = []
    for image in images:
        pixels = mx.array(how.scaled(image))[None].astype(dtype)
        state, _, _ = inner.vision_tower(pixels, output_hidden_states=True)
        made.append(inner.multi_modal_projector(state)[0] / scale)
    return ImageRows(mx.concatenate(made))


def _encode_pixtral(inner: Any, images: Sequence[MediaInput], how: Preprocessing) -> ImageRows:
    """Encode images of any size, of which `merge` x `merge` patches become a row: Mistral 3."""
    dtype = inner.vision_tower.vision_model.patch_conv.weight.dtype
    projector, merge = inner.multi_modal_projector, how.merge
    made = []
    for image in images:
        pixels = mx.array(how.scaled(image))[None].astype(dtype)
        size = (image.height, image.width)
        *_, states = inner.vision_tower(pixels, output_hidden_states=True, image_sizes=[size])
        rows = projector.norm(states[inner.vision_feature_layer].squeeze(0))
        high, wide = (side // (how.patch * merge) for side in size)
        rows = rows.reshape(high, merge, wide, merge, -1).transpose(0, 2, 4, 1, 3)
        rows = projector.patch_merger.merging_layer(rows.reshape(high * wide, -1))
        made.append(projector.linear_2(projector.gelu(projector.linear_1(rows))))
    return ImageRows(mx.concatenate(made))


def _encode_pooled(inner: Any, images: Sequence[MediaInput], how: Preprocessing) -> ImageRows:
    """Encode images of any size, of which `merge` x `merge` patches are averaged: Gemma 4."""
    scale = inner.config.text_config.hidden_size**0.5
    made = []
    for image in images:
        pixels = mx.array(how.scaled(image).transpose(2, 0, 1))[None]
        made.append(inner.encode_image(pixels)[0] / scale)
    return ImageRows(mx.concatenate(made))


def encode_recording(inner: Any, audio: MediaInput) -> Array:
    """Return the rows of a recording, one for each of its tokens: Gemma 4."""
    extraction = importlib.import_module("mlx_vlm.models.gemma4.audio_feature_extractor")
    samples = np.frombuffer(audio.pixels, dtype="<i2").astype(np.float32) / 32_768
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Gemma's own filters are finer than some of the frequencies
        features = extraction.Gemma4AudioFeatureExtractor()([samples])
    heard, is_padding = (
        mx.array(features["input_features"][0])[None],
        ~mx.array(features["input_features_mask"][0])[None],
    )
    rows, _ = inner.audio_tower(heard, is_padding)
    rows = inner.embed_audio(rows)[0] / inner.config.text_config.hidden_size**0.5
    # The last token may stand for less than its 40 ms, and then the tower has no row for it.
    return rows[mx.minimum(mx.arange(audio.tokens), len(rows) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The properties that models of one type share."""

    encode: Encode
    sizing: Sizing = Sizing.AREA
    parts: tuple[str, ...] = ("vision_tower",)
    """Names of the modules of mlx-vlm's model beside its language model, as far as a model has them."""
    axes: Literal["", "sections", "interleaved"] = ""
    """The way the frequencies of a head are divided among time, row and column; "" for one position a token."""
    has_frames: bool = False
    """True if it sees pairs of frames, each with its time before it."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Preprocessing where the folder's file says nothing."""


_GEMMA4: Final[Mapping[str, Any]] = {
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
}
_QWEN3: Final = Family(
    encode=_encode_patches, axes="interleaved", has_frames=True, usual={"patch_size": 16}
)
FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2_vl": Family(encode=_encode_patches, axes="sections"),
    "qwen2_5_vl": Family(encode=_encode_patches, axes="sections"),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": Family(
        encode=_encode_square,
        sizing=Sizing.SQUARE,
        parts=("vision_tower", "multi_modal_projector"),
    ),
    "gemma4": Family(
        encode=_encode_pooled,
        sizing=Sizing.BUDGET,
        parts=("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
        usual=_GEMMA4,
    ),
    "glm4v": Family(encode=_encode_patches, axes="sections"),
    "glm4v_moe": Family(encode=_encode_patches, axes="sections"),
    "mistral3": Family(
        encode=_encode_pixtral,
        sizing=Sizing.EDGE,
        parts=("vision_tower", "multi_modal_projector"),
    ),
}
"""Model types whose images this engine reads: those for which tests compare batches with mlx-vlm alone."""


def read_rules(
    config: Mapping[str, Any], folder: Path, limits: Vision, spell: Callable[[int], str]
) -> tuple[Preprocessing, ImageRules]:
    """Return the preprocessing of a model's images, and the rules for those of requests.

    `spell` returns a token as chat templates write it.

    Raises:
        ModelUnusableError: a file is missing, or has no numbers where they are needed.

    """
    family = FAMILIES[config["model_type"]]
    try:
        fields = {**family.usual, **_read_fields(folder)}
        return _preprocessing(config, fields, family), _rules(config, fields, limits, spell)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError) as error:
        raise ModelUnusableError(
            f"{folder}: the preprocessing of images cannot be read from preprocessor_config.json, processor_config.json and "
            f"config.json: {error!r}"
        ) from error


def _read_fields(folder: Path) -> dict[str, Any]:
    """Return the image processor's fields that are set, wherever the folder has them."""
    path = folder / "processor_config.json"
    fields = _read_json(path).get("image_processor") if path.exists() else None
    if not isinstance(fields, dict):
        fields = _read_json(folder / "preprocessor_config.json")
    return {name: value for name, value in fields.items() if value is not None}


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise ValueError(f"{path.name} has more than {_MAX_FILE_BYTES} bytes")
    fields: dict[str, Any] = json.loads(raw)
    return fields


def _preprocessing(
    config: Mapping[str, Any], fields: Mapping[str, Any], family: Family
) -> Preprocessing:
    vision = config["vision_config"]
    patch, merge = fields.get("patch_size", 14), fields.get("merge_size", 2)
    if family.sizing is Sizing.EDGE:
        patch, merge = vision["patch_size"], config.get("spatial_merge_size", 2)
    elif family.sizing is Sizing.BUDGET:
        merge = fields["pooling_kernel_size"]
    elif family.sizing is Sizing.SQUARE:
        patch, merge = vision["patch_size"], 1
    return Preprocessing(
        patch=int(patch),
        merge=int(merge),
        frames=int(fields.get("temporal_patch_size", 2)),
        mean=tuple(map(float, fields.get("image_mean", _MEAN))),
        deviation=tuple(map(float, fields.get("image_std", _DEVIATION))),
    )


def _rules(
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    limits: Vision,
    spell: Callable[[int], str],
) -> ImageRules:
    family = FAMILIES[config["model_type"]]
    how = _preprocessing(config, fields, family)
    size = fields.get("size") or {}
    token = int(config.get("image_token_id", config.get("image_token_index", 151655)))
    image = marker = spell(token)
    factor, around, row_end = how.patch * how.merge, ("", ""), ""
    least, most = _MIN_PIXELS, _MAX_PIXELS
    match family.sizing:
        case Sizing.AREA:
            least = int(fields.get("min_pixels") or size.get("shortest_edge") or least)
            most = int(fields.get("max_pixels") or size.get("longest_edge") or most)
        case Sizing.SQUARE:
            side = int(size.get("height") or config["vision_config"]["image_size"])
            tokens = int(config.get("mm_tokens_per_image", 256))
            factor, least, most = side // math.isqrt(tokens), side * side, side * side
            marker = spell(int(config.get("boi_token_index", 255999)))
            around = (f"\n\n{marker}", spell(int(config.get("eoi_token_index", 256000))) + "\n\n")
        case Sizing.EDGE:
            edge = int(size.get("longest_edge") or _LONGEST_EDGE)
            least, most = factor * factor, edge * edge
            row_end = str(fields.get("image_break_token", "[IMG_BREAK]"))
            around = ("", str(fields.get("image_end_token", "[IMG_END]")))
        case Sizing.BUDGET:
            least = most = int(fields["max_soft_tokens"]) * factor * factor
            around = (spell(int(config["boi_token_id"])), spell(int(config["eoi_token_id"])))
    return ImageRules(
        limits=limits,
        sizing=family.sizing,
        factor=factor,
        min_pixels=least,
        max_pixels=most,
        token=token,
        token_text=image,
        marker=marker,
        around=around,
        row_end=row_end,
        video=_video_rules(config, spell) if family.has_frames else None,
        audio=_audio_rules(config, spell) if config.get("audio_config") else None,
    )


def _video_rules(config: Mapping[str, Any], spell: Callable[[int], str]) -> MarkerRules:
    around = spell(config["vision_start_token_id"]), spell(config["vision_end_token_id"])
    token = spell(config["video_token_id"])
    return MarkerRules(
        marker=token.join(around),
        token=config["video_token_id"],
        token_text=token,
        around=around,
    )


def _audio_rules(config: Mapping[str, Any], spell: Callable[[int], str]) -> MarkerRules:
    token = spell(config["audio_token_id"])
    return MarkerRules(
        marker=token,
        token=config["audio_token_id"],
        token_text=token,
        around=(spell(config["boa_token_id"]), spell(config["eoa_token_id"])),
    )
