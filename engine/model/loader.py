"""Loads a model from its folder into memory with mlx-lm: weights, tokenizer and LoRA adapter. Worker thread only."""

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import utils
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from engine.errors import StoppedError, is_panic, summarize
from engine.gauges import Gauges
from engine.grammar import llguidance_backend
from engine.grammar.interface import GrammarCompiler
from engine.model import absent_tensors, adapter_bank, adapters, mlx_group, pooler
from engine.model.adapter_bank import AdapterBank
from engine.model.mlx_group import ModelSplit
from engine.model.pooler import PoolerConfig
from engine.text.codec import TextCodec
from engine.vision import vision_model
from engine.vision.image_reader import ImageRules
from models.model_files import ModelFacts, ModelUnusableError
from schemas.vision import Vision

Model: TypeAlias = Any  # an mlx.nn.Module; mlx ships no types

# Weights are read this many bytes at a time, so that progress is visible and a stop takes effect.
_SLICE_BYTES = 256 << 20

# Files that each contain a whole tokenizer's vocabulary.
# Some tokenizers load and then fail on every text.
_PROBE = "Hello, world! 123"
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model"),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, ready to generate."""

    model: Model
    codec: TextCodec
    vocab_size: int
    pooling: PoolerConfig | None = None
    has_head: bool = True
    grammars: GrammarCompiler | None = None
    adapters: AdapterBank | None = None
    """Chooses among several adapters; None for a model with none, or with one for all requests."""
    image_rules: ImageRules | None = None
    """The images that it sees; None if it reads text only. The model is a VisionModel otherwise."""
    draft: Model | None = None
    """The draft model (draft_model.py). It has the same tokens; padding may make its logits wider or narrower."""
    mtp_head: Model | None = None
    """Its own head for multi-token prediction (mtp_head.py), if the config uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The parts of a model beside its own weights."""

    adapter: Path | Mapping[str, Path] | None = None
    """The folder of a LoRA adapter, or the folders of several by name, of which requests choose."""
    split: ModelSplit | None = None
    """This rank's part of the model; None for all of it."""
    vision: Vision | None = None
    """The limits of images; None for a model that reads text only. Excludes the others."""


_WHOLE_MODEL = LoadOptions()


def load(
    folder: Path,
    facts: ModelFacts,
    gauges: Gauges,
    *,
    is_stopping: Callable[[], bool],
    options: LoadOptions = _WHOLE_MODEL,
) -> LoadedModel:
    """Load the model of a folder, and write the progress into `gauges`.

    Raises:
        ModelUnusableError: mlx-lm cannot serve the model or the adapter.
        StoppedError: `is_stopping` became true.

    """
    how = pooler.read_config(folder, facts)
    vision, split = options.vision, options.split
    if vision is not None:
        vision_model.check_installed(facts.model_type, folder)
    with raise_unusable(f"{folder}: config.json and the weights make no model"):
        # A text model without a head is a broken one; an embedding model needs none.
        has_head = how is None or has_output_head(folder)
        model, config = _build(folder, vision) if how is None else load_embedding_model(folder, how)
        if split is not None:
            mlx_group.split_model(model, split)
        caches = make_prompt_cache(model)
    bank = _add_adapters(model, options.adapter, folder, how)
    if not all(hasattr(cache, "merge") for cache in caches):
        name = config.get("model_type")
        raise ModelUnusableError(f"{folder}: model type {name} cannot be batched by mlx-lm")
    with absent_tensors.reads_explained(folder):
        codec = _read_weights_and_tokenizer(folder, config, model, gauges, is_stopping)
    rules = None
    if vision is not None:
        spell = partial(_spell_token, codec)
        rules = vision_model.prepare(model, config, folder, vision, spell)
    log.info(
        "model loaded",
        extra={
            "bytes": gauges.loaded_bytes,
            "mlx_lm": importlib.metadata.version("mlx-lm"),
            "has_chat_template": codec.has_chat_template,
        },
    )
    return LoadedModel(
        model=model,
        codec=codec,
        vocab_size=facts.vocab_size or codec.size,
        pooling=how,
        has_head=has_head,
        grammars=llguidance_backend.make_compiler(codec.serialized, codec.eos_ids),
        adapters=bank,
        image_rules=rules,
    )


def _build(folder: Path, vision: Vision | None) -> tuple[Model, dict[str, Any]]:
    """Build a model, whose weights are read later; return it and its config."""
    classes: Callable[[dict[str, Any]], tuple[Any, Any]] = vision_model.model_classes
    if vision is None:
        classes = absent_tensors.model_classes(folder)
    return load_model(folder, lazy=True, get_model_classes=classes, trust_remote_code=False)


def _spell_token(codec: TextCodec, token: int) -> str:
    return codec.piece(token).decode(errors="replace")


def _add_adapters(
    model: Model,
    adapter: Path | Mapping[str, Path] | None,
    folder: Path,
    pooling: PoolerConfig | None,
) -> AdapterBank | None:
    """Apply the one adapter, or add those that requests choose."""
    if adapter is None:
        return None
    if isinstance(adapter, Path):
        adapters.apply_adapter(model, adapter)
        return None
    if pooling is not None:
        raise ModelUnusableError(
            f"{folder}: an embedding model cannot choose adapters by request; deploy one by spec.model.adapter"
        )
    return adapter_bank.add_adapters(model, adapter, make_caches=lambda: make_prompt_cache(model))


def _read_weights_and_tokenizer(
    folder: Path,
    config: dict[str, Any],
    model: Model,
    gauges: Gauges,
    is_stopping: Callable[[], bool],
) -> TextCodec:
    """Read the weights, which needs the disk and no Python, and the tokenizer, which takes up to 2 s, in parallel."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer") as pool:
        reading = pool.submit(load_codec, folder, config)

        def is_over() -> bool:
            if reading.done():
                reading.result()  # raise a tokenizer's error before all weights are read
            return is_stopping()

        materialize(model, gauges, is_stopping=is_over)
        return reading.result()


def load_codec(folder: Path, config: dict[str, Any]) -> TextCodec:
    """Load the folder's tokenizer; `config` is the model's config.

    Raises:
        ModelUnusableError: the tokenizer is missing or cannot be read.

    """
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        # transformers would silently make an empty tokenizer.
        raise ModelUnusableError(
            f"{folder}: there is no tokenizer; add one of {', '.join(_TOKENIZER_FILES)} beside config.json"
        )
    with raise_unusable(f"{folder}: tokenizer"):
        # Without False, transformers asks on stdin whether to run a model's own code.
        extra = {"trust_remote_code": False}
        make_tokenizer: Callable[..., Any] = load_tokenizer
        eos = config.get("eos_token_id")
        codec = TextCodec(make_tokenizer(folder, extra, eos_token_ids=eos))
        codec.encode_text(_PROBE)
    complaint = codec.template_complaint()
    if complaint:
        raise ModelUnusableError(f"{folder}: the chat template cannot be used: {complaint}")
    return codec


@contextmanager
def raise_unusable(culprit: Path | str) -> Iterator[None]:
    """Turn any exception into a ModelUnusableError that names the culprit; for code that only bad files make fail."""
    try:
        yield
    except BaseException as error:
        # No narrower list is possible: the tokenizers library raises bare Exception or panics, and mlx-lm raises
        # TypeError, KeyError, AttributeError and ValueError for unusual configs.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelUnusableError(f"{culprit}: {summarize(error)}") from error


def materialize(model: Model, gauges: Gauges, *, is_stopping: Callable[[], bool]) -> None:
    """Read the weights, a slice at a time; on Linux as float32.

    MLX's CPU backend multiplies float16 and bfloat16 about 30 times slower than float32, in dense
    layers and in the scales of quantized ones. Packed integers stay as they are. The price is
    memory: twice the size of a dense float16 file.
    """
    parameters = cast("list[tuple[str, Any]]", tree_flatten(model.parameters()))
    # A draft model is loaded after the model.
    gauges.total_bytes = gauges.loaded_bytes + sum(array.nbytes for _, array in parameters)
    for part in _slices(parameters):
        if is_stopping():
            raise StoppedError
        wide = [(name, _widen(array)) for name, array in part]
        mx.eval([array for _, array in wide])
        model.update(tree_unflatten(wide))
        gauges.loaded_bytes += sum(array.nbytes for _, array in part)
        gauges.active_bytes = mx.get_active_memory()
        gauges.peak_bytes = mx.get_peak_memory()


def _widen(array: Any) -> Any:
    if sys.platform == "linux" and array.dtype in (mx.float16, mx.bfloat16):
        return array.astype(mx.float32)
    return array


def _slices(parameters: Iterable[tuple[str, Any]]) -> Iterable[list[tuple[str, Any]]]:
    part: list[tuple[str, Any]] = []
    for entry in parameters:
        part.append(entry)
        if sum(array.nbytes for _, array in part) >= _SLICE_BYTES:
            yield part
            part = []
    if part:
        yield part


def has_output_head(folder: Path) -> bool:
    """Return whether the weights contain an output head; one tied to the embeddings may never have been trained."""
    return any("lm_head." in name for name in tensor_names(folder))


def tensor_names(folder: Path) -> set[str]:
    """Return the names of all tensors; reads only the files' headers."""
    found: set[str] = set()
    for path in folder.glob("model*.safetensors"):
        tensors: Any = mx.load(str(path))
        found |= tensors.keys()
    return found


def load_embedding_model(folder: Path, pooling: PoolerConfig) -> tuple[Any, dict[str, Any]]:
    """Load an embedding model or a cross-encoder lazily, as mlx-lm does; a missing head is tied, and never used.

    Qwen3-Embedding and e5-mistral store the inner model: names without `model.` and no head, whatever their config says
    about tied embeddings (vllm-metal #730, QwenLM/Qwen3-VL-Embedding #89). mlx-lm refuses both.
    """
    config = {} if has_output_head(folder) else {"tie_word_embeddings": True}
    model, found = utils.load_model(
        folder,
        lazy=True,
        model_config=config,
        get_model_classes=partial(_prefixed_classes, pooling),
        trust_remote_code=False,
    )
    return model, found


def _prefixed_classes(pooling: PoolerConfig, config: dict[str, Any]) -> tuple[Any, Any]:
    model_class, args_class = utils._get_classes(config)  # noqa: SLF001 - the default of `load_model`

    def sanitize(model: Any, weights: dict[str, Any]) -> dict[str, Any]:
        if not any(name.startswith(("model.", "language_model.")) for name in weights):
            weights = {
                name if name.startswith(("lm_head.", "score.")) else f"model.{name}": array
                for name, array in weights.items()
            }
        if not hasattr(model_class, "sanitize"):
            return weights
        found: dict[str, Any] = model_class.sanitize(model, weights)
        return found

    def init(model: Any, args: Any) -> None:
        model_class.__init__(model, args)
        if pooling.score is not None:
            model.score = Linear(pooling.width, 1, bias=False)

    members = {"sanitize": sanitize, "__init__": init}
    return type(model_class.__name__, (model_class,), members), args_class
