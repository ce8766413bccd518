"""From a checked folder to a model in memory, through mlx-lm. Runs in the worker thread alone."""

import gc
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, load_tokenizer

from nodeagent.engine.errors import StoppedError, reason
from nodeagent.engine.grammar import llg
from nodeagent.engine.grammar.port import Grammars
from nodeagent.engine.model import adapters, headless, pooling, sharding
from nodeagent.engine.model.pooling import Pooling
from nodeagent.engine.model.sharding import Split
from nodeagent.engine.state import Gauges
from nodeagent.engine.text.codec import TextCodec
from nodeagent.modeldir import ModelFacts, ModelUnusableError

Model: TypeAlias = Any  # an mlx.nn.Module; mlx ships no types

# Weights are read this many bytes at a time, so that progress is seen and a stop is obeyed.
_SLICE_BYTES = 256 << 20

# Files of which each is a whole tokenizer's words.
_TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "tiktoken.model"),
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to generate."""

    model: Model
    codec: TextCodec
    vocab_size: int
    pooling: Pooling | None = None
    has_head: bool = True
    grammars: Grammars | None = None
    draft: Model | None = None
    """A small model that guesses (draft.py). It has the same tokens; padding may make its logits wider or narrower."""


def load(
    folder: Path,
    facts: ModelFacts,
    gauges: Gauges,
    *,
    is_stopping: Callable[[], bool],
    adapter: Path | None = None,
    split: Split | None = None,
) -> Loaded:
    """Load the folder's model, telling `gauges` how far it got.

    `adapter` is a folder with a LoRA adapter for it; `split` says which part of it this rank has, None: all of it.

    Raises:
        ModelUnusableError: mlx-lm cannot serve what is in the folder, or in the adapter's.
        StoppedError: `is_stopping` became true.

    """
    how = pooling.read(folder, facts)
    with blaming(f"{folder}: config.json and the weights make no model"):
        # A text model without a head is a broken one; an embedding model needs none.
        has_head = how is None or headless.has_head(folder)
        model, config = load_model(folder, lazy=True) if how is None else headless.load(folder)
        if split is not None:
            sharding.split(model, split)
        caches = make_prompt_cache(model)
    if adapter is not None:
        adapters.apply(model, adapter)
    if not all(hasattr(cache, "merge") for cache in caches):
        name = config.get("model_type")
        raise ModelUnusableError(f"{folder}: model type {name} cannot be batched by mlx-lm")
    codec = _read_both(folder, config, model, gauges, is_stopping)
    log.info(
        "model loaded",
        extra={
            "bytes": gauges.loaded_bytes,
            "mlx_lm": importlib.metadata.version("mlx-lm"),
            "has_chat_template": codec.has_chat_template,
        },
    )
    return Loaded(
        model=model,
        codec=codec,
        vocab_size=facts.vocab_size or codec.size,
        pooling=how,
        has_head=has_head,
        grammars=llg.grammars(codec.serialized, codec.eos_ids),
    )


def _read_both(
    folder: Path,
    config: dict[str, Any],
    model: Model,
    gauges: Gauges,
    is_stopping: Callable[[], bool],
) -> TextCodec:
    """Read the weights, which needs the disk and no Python, beside the tokenizer, which needs half a second or two."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer") as pool:
        reading = pool.submit(codec_of, folder, config)

        def is_over() -> bool:
            if reading.done():
                reading.result()  # what is wrong with it is better said before the last of the weights
            return is_stopping()

        materialize(model, gauges, is_stopping=is_over)
        return reading.result()


def codec_of(folder: Path, config: dict[str, Any]) -> TextCodec:
    """Return the folder's tokenizer; `config` is its model's.

    Raises:
        ModelUnusableError: there is none, or it cannot be read.

    """
    if not any((folder / name).exists() for name in _TOKENIZERS):
        # transformers would make an empty one from nothing.
        raise ModelUnusableError(
            f"{folder}: there is no tokenizer; one of {', '.join(_TOKENIZERS)} belongs beside config.json"
        )
    with blaming(f"{folder}: tokenizer"):
        # Without a False, transformers asks on stdin whether to run a model's own code.
        extra = {"trust_remote_code": False}
        make_tokenizer: Callable[..., Any] = load_tokenizer
        eos = config.get("eos_token_id")
        codec = TextCodec(make_tokenizer(folder, extra, eos_token_ids=eos))
    complaint = codec.template_complaint()
    if complaint:
        raise ModelUnusableError(f"{folder}: the chat template cannot be parsed: {complaint}")
    return codec


@contextmanager
def blaming(culprit: Path | str) -> Iterator[None]:
    """Say whose fault it is, while nothing but files can be at fault."""
    try:
        yield
    except Exception as error:
        # There is no list to catch: the tokenizers library raises bare Exception, and a config's
        # oddities come out of mlx-lm as TypeError, KeyError, AttributeError and ValueError.
        raise ModelUnusableError(f"{culprit}: {reason(error)}") from error


def free() -> None:
    """Return the memory of a model which nobody holds any more."""
    gc.unfreeze()  # the service froze what was there when the model was ready: the model, too
    gc.collect()
    mx.clear_cache()
    log.info("model unloaded", extra={"active_bytes": mx.get_active_memory()})


def materialize(model: Model, gauges: Gauges, *, is_stopping: Callable[[], bool]) -> None:
    """Read the weights, a slice at a time; on Linux as float32.

    MLX's CPU backend multiplies float16 and bfloat16 some 30 times slower than float32, in dense
    layers as well as by the scales of quantized ones. Packed integers stay as they are. The price
    is memory: twice the size of a dense float16 file.
    """
    parameters = cast("list[tuple[str, Any]]", tree_flatten(model.parameters()))
    # A draft model comes after the model.
    gauges.total_bytes = gauges.loaded_bytes + sum(array.nbytes for _, array in parameters)
    for part in _slices(parameters):
        if is_stopping():
            raise StoppedError
        wide = [(name, _widened(array)) for name, array in part]
        mx.eval([array for _, array in wide])
        model.update(tree_unflatten(wide))
        gauges.loaded_bytes += sum(array.nbytes for _, array in part)
        gauges.active_bytes = mx.get_active_memory()
        gauges.peak_bytes = mx.get_peak_memory()


def _widened(array: Any) -> Any:
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
