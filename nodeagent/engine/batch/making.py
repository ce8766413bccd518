"""Puts a batch together for one loaded model."""

from machinery.clock import Clock
from nodeagent.engine.batch.batch import Batch
from nodeagent.engine.batch.embed import Embedder
from nodeagent.engine.batch.executor import Executor
from nodeagent.engine.batch.guessing import Guesser
from nodeagent.engine.cache.making import make_caches
from nodeagent.engine.cache.options import KvOptions
from nodeagent.engine.cache.prefix import BlockPrefixCache
from nodeagent.engine.config import EngineConfig
from nodeagent.engine.memory.guard import Memory
from nodeagent.engine.model.loading import Loaded
from nodeagent.engine.state import Gauges


def make_executor(
    loaded: Loaded, config: EngineConfig, *, prefix_bytes: int, token_bytes: int | None = None
) -> Executor:
    """Return what a rank does plans with; its prefix cache may hold so much, and counts a token for so much."""
    options = KvOptions(bits=config.kv_bits, window=config.kv_window)
    guesser = None
    if loaded.draft is not None:
        guesser = Guesser(model=loaded.draft, count=config.draft_tokens)
    return Executor(
        model=loaded.model,
        ends=frozenset(loaded.codec.eos_ids),
        prefix=BlockPrefixCache(
            lambda: make_caches(loaded.model, options),
            limit_bytes=prefix_bytes,
            token_bytes=token_bytes,
        ),
        grammars=loaded.grammars,
        guesser=guesser,
    )


def make(loaded: Loaded, executor: Executor, memory: Memory, gauges: Gauges, clock: Clock) -> Batch:
    """Return a batch that is idle."""
    embedder = None if loaded.pooling is None else Embedder(loaded.model, loaded.pooling)
    return Batch(executor=executor, memory=memory, gauges=gauges, clock=clock, embedder=embedder)
