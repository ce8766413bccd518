"""A model of mlx-vlm in the batch: reads images of prompts, and gives every row its own positions. Worker thread only.

mlx-vlm's language model keeps the positions of the last image in itself, so two requests would spoil each other. Here
each pass gets the positions of its rows as arguments, and nothing is kept between passes.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from typing_extensions import override

from engine.jobs import Job
from engine.vision.image_reader import ImageRules
from models.model_files import ModelUnusableError
from schemas.vision import Vision

Array: TypeAlias = Any  # mlx ships no types

ARCHITECTURES: Final = ("qwen2_vl", "qwen2_5_vl")
"""Model types whose images this engine reads: those for which tests compare batches with single requests."""
_AXES: Final = 3
"""Positions of a token: time, row and column."""
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 14 * 14 * 4 * 1280
# Of OpenAI's CLIP, which Qwen's preprocessor_config.json repeats.
_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenPrompt:
    """The prompt of a job with images, ready to be read."""

    embeddings: Array
    """Of shape (tokens, width)."""
    positions: Array
    """Of shape (3, tokens)."""
    shift: int
    """Added to the index of a token behind the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """The fields of preprocessor_config.json that are used."""

    patch: int
    merge: int
    frames: int
    """An image is repeated to so many frames, as models of videos want it."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...] = _MEAN
    deviation: tuple[float, ...] = _DEVIATION

    def patches(self, width: int, height: int, pixels: bytes) -> np.ndarray[Any, Any]:
        """Return the patches of an image, one a row, in the order in which the model merges them."""
        image = np.frombuffer(pixels, dtype=np.uint8).reshape(height, width, 3)
        scaled = (image.astype(np.float32) / 255.0 - self.mean) / self.deviation
        side, merge = self.patch, self.merge
        rows, columns = height // (side * merge), width // (side * merge)
        parts = scaled.astype(np.float32).reshape(rows, merge, side, columns, merge, side, 3)
        parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)  # blocks, patches of a block, color, y, x
        parts = np.repeat(parts[..., None, :, :], self.frames, axis=-3)
        return parts.reshape(rows * columns * merge * merge, -1)


_USUAL: Final = Preprocessing(
    patch=14, merge=2, frames=2, min_pixels=_MIN_PIXELS, max_pixels=_MAX_PIXELS
)


class VisionModel(Module):
    """A model of mlx-vlm that is called like one of mlx-lm."""

    def __init__(self, model: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # mlx ships few types
        # The parameters are those of the parts, by mlx-vlm's names; what begins with _ has none.
        self.vision_tower = model.vision_tower
        self.language_model = model.language_model
        self._inner = model
        self._preprocessing = _USUAL
        self._seen: dict[int, _SeenPrompt] = {}
        self._rows: tuple[tuple[int, int], ...] = ()

    @property
    def layers(self) -> Any:
        """Return the layers that have caches."""
        return self.language_model.layers

    def preprocess_as(self, preprocessing: Preprocessing) -> None:
        """Set how images become patches."""
        self._preprocessing = preprocessing

    def see(self, job: Job) -> None:
        """Compute what a job's images are to the language model; keeps it until `forget`."""
        prompt = mx.array([job.prompt])
        found = [
            self._preprocessing.patches(image.width, image.height, image.pixels)
            for image in job.images
        ]
        side = self._preprocessing.patch
        grids = mx.array([[1, image.height // side, image.width // side] for image in job.images])
        input_embeddings = self._inner.get_input_embeddings(
            prompt, mx.array(np.concatenate(found)), image_grid_thw=grids
        )
        mx.eval(
            input_embeddings.inputs_embeds,
            input_embeddings.position_ids,
            input_embeddings.rope_deltas,
        )
        self._seen[job.id] = _SeenPrompt(
            embeddings=input_embeddings.inputs_embeds[0],
            positions=input_embeddings.position_ids[:, 0],
            shift=int(input_embeddings.rope_deltas.item()),
        )

    def forget(self, job_ids: Sequence[int]) -> None:
        """Free what `see` kept of these jobs."""
        for job_id in job_ids:
            self._seen.pop(job_id, None)

    def select(self, jobs: Sequence[Job], starts: Sequence[int] = ()) -> None:
        """Set the rows of the next pass; `starts` are the tokens in their caches, () behind all prompts."""
        for job in jobs:
            if job.images and job.id not in self._seen:
                self.see(job)
        self._rows = tuple(zip((job.id for job in jobs), starts or [-1] * len(jobs), strict=True))

    @override
    def __call__(self, tokens: Array, cache: Any = None) -> Array:
        """Return the logits of each token; `select` named the rows."""
        rows, length = tokens.shape
        language = self.language_model
        offset = cache[0].offset
        first = offset.reshape(-1, 1) if isinstance(offset, mx.array) else mx.array([[offset]])
        shifts = [self._shift(at) for at in range(rows)]
        indices = first + mx.arange(length)[None, :]
        positions = mx.broadcast_to(
            (indices + mx.array(shifts)[:, None])[None], (_AXES, rows, length)
        )
        embeddings = language.model.embed_tokens(tokens)
        for at, (job_id, start) in enumerate(self._rows[:rows]):
            prompt = self._seen.get(job_id)
            if prompt is not None and 0 <= start < len(prompt.embeddings):
                embeddings, positions = _place(embeddings, positions, at, start, prompt)
        return language(
            tokens, inputs_embeds=embeddings, cache=cache, position_ids=positions
        ).logits

    def _shift(self, at: int) -> int:
        prompt = self._seen.get(self._rows[at][0]) if at < len(self._rows) else None
        return 0 if prompt is None else prompt.shift


def _place(
    embeddings: Array, positions: Array, row: int, start: int, seen: _SeenPrompt
) -> tuple[Array, Array]:
    """Return the inputs of a pass with the part of a prompt that begins at token `start`, in its row."""
    count = min(embeddings.shape[1], len(seen.embeddings) - start)
    embeddings = mx.array(embeddings)
    embeddings[row, :count] = seen.embeddings[start : start + count]
    positions = mx.array(positions)
    positions[:, row, :count] = seen.positions[:, start : start + count]
    return embeddings, positions


def check_installed(model_type: str, folder: Path) -> None:
    """Refuse a model whose images this engine cannot read.

    Raises:
        ModelUnusableError: mlx-vlm is not installed, or the architecture is not supported.

    """
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelUnusableError(
            f"{folder}: spec.model.vision is for {known}, and this is {model_type}; leave it out to serve text"
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        raise ModelUnusableError(
            "spec.model.vision needs mlx-vlm on this Mac: install mlx-fleet[vision]",
            reason="ArchitectureUnsupported",
        )


def model_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the classes that `mlx_lm.utils.load_model` builds: mlx-vlm's model, wrapped, and its config."""
    module = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")

    class Arguments:
        """The config of mlx-vlm, made as mlx-lm makes its own."""

        @classmethod
        def from_dict(cls, fields: Mapping[str, Any]) -> Any:
            """Return mlx-vlm's config."""
            own = dict(fields)
            text = own.get("text_config") or {
                name: value for name, value in own.items() if name != "vision_config"
            }
            made = module.ModelConfig.from_dict(own | {"vision_config": {}})
            made.text_config = module.TextConfig.from_dict(dict(text))
            made.vision_config = module.VisionConfig.from_dict(dict(own["vision_config"]))
            return made

    class Model(VisionModel):
        """The wrapped model, whose weights have the names of mlx-vlm's."""

        def __init__(self, arguments: Any) -> None:
            super().__init__(module.Model(arguments))

        def sanitize(self, weights: dict[str, Array]) -> dict[str, Array]:
            """Return the weights by the names of the wrapped model."""
            named: dict[str, Array] = self.vision_tower.sanitize(self._inner.sanitize(weights))
            return named

    return Model, Arguments


def read_preprocessing(folder: Path) -> Preprocessing:
    """Return the preprocessing of a model's images.

    Raises:
        ModelUnusableError: its file is missing, or has no numbers where they are needed.

    """
    path = folder / "preprocessor_config.json"
    try:
        found = json.loads(path.read_bytes())
        size = found.get("size") or {}
        usual = _USUAL
        return Preprocessing(
            patch=int(found.get("patch_size", usual.patch)),
            merge=int(found.get("merge_size", usual.merge)),
            frames=int(found.get("temporal_patch_size", usual.frames)),
            min_pixels=int(
                found.get("min_pixels") or size.get("shortest_edge") or usual.min_pixels
            ),
            max_pixels=int(found.get("max_pixels") or size.get("longest_edge") or usual.max_pixels),
            mean=tuple(map(float, found.get("image_mean", usual.mean))),
            deviation=tuple(map(float, found.get("image_std", usual.deviation))),
        )
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelUnusableError(f"{path}: {error}") from error


def prepare(
    model: VisionModel, config: Mapping[str, Any], folder: Path, limits: Vision
) -> ImageRules:
    """Set the preprocessing of a model's images; return the rules for those of requests.

    Raises:
        ModelUnusableError: the folder has none.

    """
    preprocessing = read_preprocessing(folder)
    model.preprocess_as(preprocessing)
    return ImageRules(
        limits=limits,
        factor=preprocessing.patch * preprocessing.merge,
        min_pixels=preprocessing.min_pixels,
        max_pixels=preprocessing.max_pixels,
        token=int(config.get("image_token_id", 151655)),
    )
