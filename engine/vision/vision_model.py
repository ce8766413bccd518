"""A model that sees images, in the batch: mlx-lm's language model behind a tower of mlx-vlm. Worker thread only.

The language model is the one that serves text, so batches, caches and kernels are the same. Three of its parts read what
a pass is about: the embedding takes the rows of images, the rotation takes positions, and the first layers of Qwen3-VL
add rows of their own. Nothing is kept between passes.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.cache import make_prompt_cache
from typing_extensions import override

from engine.jobs import Job
from engine.vision import glm_language, media_reader, positions, towers
from engine.vision.image_reader import ImageRules
from engine.vision.positions import Rotation, Span
from engine.vision.towers import FAMILIES, Family, ImageRows, Preprocessing
from models.model_files import ModelUnusableError
from schemas.vision import Vision

Array: TypeAlias = Any  # mlx ships no types
Cache: TypeAlias = Any
_TOWER_WORDS = ("visual", "vision", "audio", "multi_modal_projector")
"""Words in the names of weights beside those of the language model."""


@dataclass(slots=True, kw_only=True)
class _SeenPrompt:
    """The prompt of a job with images."""

    image_indices: np.ndarray[Any, Any]
    """The image of each token, -1 for text."""
    is_block: np.ndarray[Any, Any]
    """True for each token that sees all tokens of its image."""
    positions: np.ndarray[Any, Any] | None
    """Of shape (3, tokens); None if the model has one position a token."""
    shift: int
    """Added to the index of a token behind the prompt."""
    rows: ImageRows | None = None
    """None until a pass reads one of its images: those whose keys and values are cached are not read again."""


@dataclass(slots=True, kw_only=True)
class _Pass:
    """The values that the parts of the language model read during a pass."""

    shifts: Array = None
    """Of shape (rows,); None if all are 0."""
    rotation: Rotation | None = None
    places: Array = None
    """Indices of the tokens of images in the only row; None if there are none."""
    rows: ImageRows | None = None
    """As many rows as there are places."""


@dataclass(slots=True, kw_only=True)
class _Parts:
    """The models behind a VisionModel, which are no parameters of it."""

    family: Family
    names: tuple[str, ...]
    """Of the modules beside the language model."""
    inner: Any
    """mlx-vlm's model without its language model."""
    language: Any
    """mlx-lm's model."""
    preprocessing: Preprocessing = field(default_factory=lambda: Preprocessing(patch=14, merge=2))
    tokens: tuple[int, ...] = ()
    """Those that stand for parts of images, frames and recordings."""
    axes: np.ndarray[Any, Any] | None = None
    has_blocks: bool = False
    """True if the tokens of an image see all of it, those behind them included."""


class VisionModel(Module):
    """A model of mlx-vlm that is called like one of mlx-lm."""

    def __init__(self, family: Family, inner: Any, language: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # mlx ships few types
        # The parameters are those of the parts, by mlx-vlm's names.
        names = tuple(name for name in family.parts if getattr(inner, name) is not None)
        for name in names:
            setattr(self, name, getattr(inner, name))
        self.language_model = language.language_model
        self.parts = _Parts(family=family, names=names, inner=inner, language=language)
        self._pass = _Pass()
        self._seen: dict[int, _SeenPrompt] = {}
        self._reading: tuple[_SeenPrompt, Job, int] | None = None

    @property
    def layers(self) -> Any:
        """Return the layers that have caches."""
        return self.parts.language.layers

    def make_cache(self) -> list[Cache]:
        """Return the caches of one sequence, of mlx-lm's kinds."""
        caches: list[Cache] = make_prompt_cache(self.parts.language)
        return caches

    def sanitize(self, weights: dict[str, Array]) -> dict[str, Array]:
        """Return the weights by the names of this model, however the folder names them."""
        inner = self.parts.inner
        tower = {
            name: array
            for name, array in weights.items()
            if any(word in name for word in _TOWER_WORDS)
        }
        for part in (inner, *(getattr(inner, name) for name in self.parts.names)):
            if hasattr(part, "sanitize"):
                tower = part.sanitize(tower)
        named = self.parts.language.sanitize(dict(weights))
        prefixes = tuple(f"{name}." for name in self.parts.names)
        return {
            name: array for name, array in named.items() if name.startswith("language_model.")
        } | {name: array for name, array in tower.items() if name.startswith(prefixes)}

    def whole_images(self, job: Job, start: int, count: int) -> int:
        """Return `count`, or more tokens, so that a piece of a prompt ends with no image cut."""
        seen = self._seen_prompt(job)
        if seen is None or not self.parts.has_blocks:
            return count
        indices, end = seen.image_indices, start + count
        while end < len(indices) and indices[end] == indices[end - 1] and seen.is_block[end]:
            end += 1
        return end - start

    def forget(self, job_ids: Sequence[int]) -> None:
        """Free what is kept of these jobs."""
        for job_id in job_ids:
            self._seen.pop(job_id, None)

    def select(self, jobs: Sequence[Job], starts: Sequence[int] = ()) -> None:
        """Set the rows of the next pass; `starts` are the tokens in their caches, () behind all prompts.

        A prompt with images is read alone.
        """
        seen = [self._seen_prompt(job) for job in jobs]
        shifts = [0 if prompt is None else prompt.shift for prompt in seen]
        self._pass = _Pass(shifts=mx.array(shifts) if any(shifts) else None)
        self._reading = None
        if len(starts) == 1 and seen[0] is not None:
            self._reading = (seen[0], jobs[0], starts[0])

    @override
    def __call__(self, tokens: Array, cache: Any = None) -> Array:
        """Return the logits of each token; `select` named the rows of this one call."""
        try:
            if self._reading is not None:
                tokens, cache = self._prepare_reading(*self._reading, tokens, cache)
            return self.parts.language(tokens, cache=cache)
        finally:
            self._pass, self._reading = _Pass(), None

    def _prepare_reading(
        self, seen: _SeenPrompt, job: Job, start: int, tokens: Array, cache: list[Cache]
    ) -> tuple[Array, list[Cache]]:
        """Set the positions and images of a piece of a prompt; return its tokens and caches for the language model."""
        length = tokens.shape[1]
        behind = np.arange(len(seen.image_indices), start + length)[-length:]
        if seen.positions is not None and start < len(seen.image_indices):
            rope = next(layer.self_attn.rope for layer in self.layers if "self_attn" in layer)
            three = seen.positions[:, start : start + length]
            extra = np.broadcast_to(behind + seen.shift, (3, len(behind)))
            assert self.parts.axes is not None
            three = np.concatenate([three, extra], axis=1)
            self._pass.rotation = Rotation(rope, self.parts.axes, three)
        images = seen.image_indices[start : start + length]
        images = np.concatenate([images, np.full(len(behind), -1)])
        if (images < 0).all():
            return tokens, cache
        if seen.rows is None:
            seen.rows = self._encode(job)
        before = int((seen.image_indices[:start] >= 0).sum())
        read = slice(before, before + int((images >= 0).sum()))
        layers = tuple(layer[read] for layer in seen.rows.layers)
        self._pass.rows = ImageRows(seen.rows.embeddings[read], layers)
        self._pass.places = mx.array(np.flatnonzero(images >= 0))
        if self.parts.has_blocks and length > 1:
            blocks = np.zeros(length, dtype=bool)
            blocks[: length - len(behind)] = seen.is_block[start : start + length]
            same = mx.array((images[:, None] == images[None]) & blocks)
            cache = [_BlockCache(layer, same) for layer in cache]
        # Gemma 4 has numbers of its own for each token; those of images are the padding's.
        return mx.where(mx.array(images >= 0), 0, tokens), cache

    def _seen_prompt(self, job: Job) -> _SeenPrompt | None:
        if not job.images:
            return None
        if job.id not in self._seen:
            self._seen[job.id] = self._look(job)
        return self._seen[job.id]

    def _look(self, job: Job) -> _SeenPrompt:
        """Find the tokens of a job's images, and compute its positions."""
        places = np.flatnonzero(np.isin(np.array(job.prompt), self.parts.tokens))
        counts = [image.tokens for image in job.images]
        indices = np.full(len(job.prompt), -1, dtype=np.int32)
        indices[places] = np.repeat(np.arange(len(counts)), counts)
        three, shift = None, 0
        if self.parts.axes is not None:
            factor = self.parts.preprocessing.patch * self.parts.preprocessing.merge
            firsts = places[np.cumsum([0, *counts[:-1]])]
            spans = [
                Span(int(first), image.height // factor, image.width // factor)
                for first, image in zip(firsts, job.images, strict=True)
            ]
            three, shift = positions.token_positions(len(job.prompt), spans)
        is_seen = np.array([image.kind != "audio" for image in job.images])
        return _SeenPrompt(
            image_indices=indices,
            is_block=(indices >= 0) & is_seen[indices],
            positions=three,
            shift=shift,
        )

    def _encode(self, job: Job) -> ImageRows:
        """Return the towers' rows for all images and recordings of a job."""
        parts = self.parts
        encode = partial(parts.family.encode, parts.inner)
        if any(image.kind == "audio" for image in job.images):
            rows = [
                towers.encode_recording(parts.inner, image)
                if image.kind == "audio"
                else encode([image], parts.preprocessing).embeddings
                for image in job.images
            ]
            made = ImageRows(mx.concatenate(rows))
        else:
            made = encode(job.images, parts.preprocessing)
        mx.eval(made.embeddings, *made.layers)
        return made

    def prepare(
        self, preprocessing: Preprocessing, config: Mapping[str, Any], tokens: Sequence[int]
    ) -> None:
        """Connect the parts of the language model with the passes, once its weights have their final classes.

        Raises:
            ValueError: the model rotates heads in a way for which no positions can be given.

        """
        parts, text = self.parts, config.get("text_config") or config
        parts.preprocessing, parts.tokens = preprocessing, tuple(tokens)
        kind = text.get("use_bidirectional_attention")
        parts.has_blocks = config["model_type"] == "gemma3" or kind == "vision"
        model = self.language_model.model
        _wrap(model.embed_tokens, self._embed)
        if not parts.family.axes:
            return
        scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
        parts.axes = positions.frequency_axes(
            scaling["mrope_section"], is_interleaved=parts.family.axes == "interleaved"
        )
        for at, layer in enumerate(model.layers):
            if at < len(config["vision_config"].get("deepstack_visual_indexes") or ()):
                _wrap(layer.mlp, partial(self._add_rows, at))
            if "self_attn" in layer:
                rope = layer.self_attn.rope
                if type(rope) is not RoPE or rope.dims != 2 * len(parts.axes):
                    raise ValueError(f"unknown rotation {type(rope).__name__} of heads")
                _wrap(rope, self._rotate)

    def _embed(self, base: Callable[..., Array], tokens: Array) -> Array:
        embeddings = base(tokens)
        if self._pass.rows is not None:
            rows = self._pass.rows.embeddings.astype(embeddings.dtype)
            embeddings[0, self._pass.places] = rows
        return embeddings

    def _rotate(self, base: Callable[..., Array], heads: Array, offset: Any = 0) -> Array:
        if self._pass.rotation is not None:
            return self._pass.rotation.apply(heads)
        return base(heads, offset if self._pass.shifts is None else offset + self._pass.shifts)

    def _add_rows(self, at: int, base: Callable[..., Array], states: Array) -> Array:
        """Add the rows of a layer to what its last part adds to the states."""
        made = base(states)
        if self._pass.rows is None:
            return made
        rows = self._pass.rows.layers[at].astype(made.dtype)
        return made.at[0, self._pass.places].add(rows)


def _wrap(module: Module, call: Callable[..., Array]) -> None:
    """Let `call` answer for a module, which keeps its parameters and their names; it gets the module's own answer."""
    base = type(module)

    def __call__(self: Module, *arguments: Any, **options: Any) -> Array:  # noqa: N807 - of a class
        return call(partial(base.__call__, self), *arguments, **options)

    module.__class__ = type(base.__name__, (base,), {"__call__": __call__})


class _BlockCache:
    """A layer's cache for one pass, whose mask lets the tokens of an image see all of it."""

    def __init__(self, cache: Cache, same: Array) -> None:
        """Wrap a cache; `same` tells for each pair of the pass's tokens whether they are of one image."""
        self._cache = cache
        self._same = same

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, count: int, **options: Any) -> Array:
        """Return the cache's own mask, with the blocks of images."""
        mask = self._cache.make_mask(count, **options | {"return_array": True})
        before = mx.zeros((count, mask.shape[-1] - count), dtype=mx.bool_)
        return mask | mx.concatenate([before, self._same], axis=1)


def check_installed(model_type: str, folder: Path) -> None:
    """Refuse a model whose images this engine cannot read.

    Raises:
        ModelUnusableError: mlx-vlm is not installed, or the architecture is not supported.

    """
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelUnusableError(
            f"{folder}: spec.model.vision is for {known}, and this is {model_type}; leave it out to serve text"
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        raise ModelUnusableError(
            "spec.model.vision needs mlx-vlm on this Mac: install mlx-fleet[vision]",
            reason="ArchitectureUnsupported",
        )


def model_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the classes that `mlx_lm.utils.load_model` builds: the model of both libraries, and its config."""
    module = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    family = FAMILIES[config["model_type"]]
    language_class, language_config = glm_language.language_classes(dict(config))

    class Arguments:
        """The configs of both libraries, made as mlx-lm makes its own."""

        @classmethod
        def from_dict(cls, fields: Mapping[str, Any]) -> Any:
            """Return mlx-vlm's config and mlx-lm's."""
            text = fields.get("text_config") or {
                name: value for name, value in fields.items() if name != "vision_config"
            }
            made = module.ModelConfig.from_dict({**fields, "vision_config": {}})
            made.text_config = module.TextConfig.from_dict(dict(text))
            made.vision_config = module.VisionConfig.from_dict(dict(fields["vision_config"]))
            if fields.get("audio_config"):
                made.audio_config = module.AudioConfig.from_dict(dict(fields["audio_config"]))
            return made, language_config.from_dict(dict(fields))

    class Model(VisionModel):
        """The wrapped model, whose weights have the names of mlx-vlm's."""

        def __init__(self, arguments: Any) -> None:
            seeing, reading = arguments
            inner = module.Model(seeing)
            inner.pop("language_model")
            super().__init__(family, inner, language_class(reading))

    return Model, Arguments


def prepare(
    model: VisionModel,
    config: Mapping[str, Any],
    folder: Path,
    limits: Vision,
    spell: Callable[[int], str],
) -> ImageRules:
    """Set the preprocessing of a model's images; return the rules for those of requests.

    `spell` returns a token as chat templates write it.

    Raises:
        ModelUnusableError: the folder has none, or one that this engine does not know.

    """
    preprocessing, rules = towers.read_rules(config, folder, limits, spell)
    try:
        model.prepare(preprocessing, config, sorted(media_reader.media_tokens(rules)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnusableError(f"{folder}: the positions of images: {error!r}") from error
    return rules
