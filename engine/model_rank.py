"""Puts a batch together for one loaded model.

One process of a model's: loads its share of it, and then leads or follows. The worker's thread alone; imports mlx.

A model on one machine has one rank, which leads nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.batch.embedder import Embedder
from engine.batch.executor import StepExecutor
from engine.batch.loop import BatchLoop
from engine.batch.speculative import DraftProposer
from engine.cache.interface import KvOptions
from engine.cache.layer_caches import make_caches
from engine.cache.prefix_cache import BlockPrefixCache
from engine.config import EngineConfig
from engine.gauges import Gauges
from engine.memory import allocation, budget
from engine.memory.guard import MemoryGuard
from engine.model import draft_model, loader, mlx_group
from engine.model.loader import LoadedModel
from engine.model.mlx_group import ModelSplit
from engine.ports import ServedModel, WorkerListener
from engine.ranks import coordinator, rendezvous
from engine.ranks.follower import Follower
from engine.ranks.messages import LoadedMessage, StartMessage
from engine.ranks.rendezvous import RankLink, WaitContext
from machinery.clock import Clock
from models import fingerprint, model_files
from models.model_files import ModelFacts, ModelUnusableError


def make_executor(
    loaded: LoadedModel, config: EngineConfig, *, prefix_bytes: int, token_bytes: int | None = None
) -> StepExecutor:
    """Return what a rank does plans with; its prefix cache may hold so much, and counts a token for so much."""
    options = KvOptions(bits=config.kv_bits, window=config.kv_window)
    guesser = None
    if loaded.draft is not None:
        guesser = DraftProposer(model=loaded.draft, count=config.draft_tokens)
    return StepExecutor(
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


def make_batch_loop(
    loaded: LoadedModel, executor: StepExecutor, memory: MemoryGuard, gauges: Gauges, clock: Clock
) -> BatchLoop:
    """Return a batch that is idle."""
    embedder = None if loaded.pooling is None else Embedder(loaded.model, loaded.pooling)
    return BatchLoop(
        executor=executor, memory=memory, gauges=gauges, clock=clock, embedder=embedder
    )


# More than anybody has room for: JSON has no infinity.
_AMPLE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGroup:
    """The other ranks of this one's group, connected."""

    link: RankLink
    group: Any
    """An mx.distributed.Group."""


@dataclass(slots=True, kw_only=True)
class ModelRank:
    """A model in memory, or this rank's share of it."""

    config: EngineConfig
    gauges: Gauges
    patience: WaitContext
    loaded: LoadedModel
    memory: MemoryGuard
    fellows: PeerGroup | None = None

    @property
    def ready(self) -> ServedModel:
        """What the event loop needs to make jobs."""
        return ServedModel(
            codec=self.loaded.codec,
            vocab_size=self.loaded.vocab_size,
            pooling=self.loaded.pooling,
            has_head=self.loaded.has_head,
            grammars=self.loaded.grammars,
            budget=self.memory.budget,
        )

    def lead(self) -> BatchLoop:
        """Return an idle batch, once all other ranks have loaded.

        Raises:
            GroupError: one of them is gone.
            StoppedError: this process is to end.

        """
        begin, others = self._own(), None
        if self.fellows is not None and self.fellows.link.coordinator is not None:
            others = self.fellows.link.coordinator
            own = self._hello(0)
            self.gauges.is_waiting = True
            hellos = [own, *others.hellos(self.patience.is_stopping)]
            self.gauges.is_waiting = False
            begin = coordinator.agree(hellos)
            self.memory = MemoryGuard(budget=self._narrowed(hellos))
            others.begin(begin)
        executor = self._executor(begin)
        batch = make_batch_loop(
            self.loaded, executor, self.memory, self.gauges, self.patience.clock
        )
        batch.others = others
        return batch

    def follow(self, listener: WorkerListener) -> None:
        """Do what rank 0 says until it says bye.

        Raises:
            GroupError: rank 0 is gone, or this rank differs from it.
            StoppedError: this process is to end, and rank 0 said nothing of it.

        """
        assert self.config.group is not None
        assert self.fellows is not None
        link = self.fellows.link
        assert link.channel is not None
        self.gauges.is_waiting = True
        begin = link.hello(self._hello(self.config.group.rank), self.patience)
        listener.on_ready(self.ready)
        with link.channel:
            Follower(
                channel=link.channel,
                executor=self._executor(begin),
                gauges=self.gauges,
                patience=self.patience,
            ).run()

    def _executor(self, begin: StartMessage) -> StepExecutor:
        return make_executor(
            self.loaded,
            self.config,
            prefix_bytes=begin.prefix_bytes,
            token_bytes=begin.token_bytes,
        )

    def _own(self) -> StartMessage:
        return StartMessage(prefix_bytes=self.memory.budget.prefix_most_bytes, token_bytes=None)

    def _hello(self, rank: int) -> LoadedMessage:
        config, found = self.config, self.memory.budget
        shaping = (config.kv_bits, config.kv_window)
        full = budget.full_bytes(found.rule, found.load)
        return LoadedMessage(
            rank=rank,
            model=fingerprint.compute(config.model_dir, shaping),
            prefix_bytes=found.prefix_most_bytes,
            token_bytes=found.rule.token_bytes,
            is_even=not (found.rule.constant_bytes or found.rule.windows),
            room=min(_AMPLE, found.kv_bytes / full) if full else _AMPLE,
        )

    def _narrowed(self, hellos: Sequence[LoadedMessage]) -> budget.MemoryBudget:
        """Return the budget with no more room for requests than the rank has that has least."""
        found = self.memory.budget
        full = budget.full_bytes(found.rule, found.load)
        room = int(coordinator.smallest_kv_share(hellos) * full)
        return replace(found, kv_bytes=min(found.kv_bytes, room))


def connect_group(
    config: EngineConfig, gauges: Gauges, patience: WaitContext, listener: WorkerListener
) -> PeerGroup | None:
    """Connect this rank to the others; None: it has none.

    Raises:
        GroupError: they do not come, or cannot be connected.
        StoppedError: this process is to end.

    """
    if config.group is None:
        return None
    gauges.is_waiting = True
    link = rendezvous.join_group(config.group, patience)
    listener.on_met(link.lines)
    link.go(patience)
    group = mlx_group.init_group(config.group, patience.pause)
    gauges.is_waiting = False
    listener.on_loading()
    return PeerGroup(link=link, group=group)


def load(
    config: EngineConfig,
    facts: ModelFacts,
    gauges: Gauges,
    patience: WaitContext,
    fellows: PeerGroup | None = None,
) -> ModelRank:
    """Load what the config names, and share the memory out.

    Raises:
        ModelUnusableError: it cannot be served.
        StoppedError: this process is to end.

    """
    group, is_stopping = config.group, patience.is_stopping
    split = None
    if fellows is not None and group is not None:
        split = ModelSplit(group=fellows.group, parallelism=group.parallelism, layers=group.layers)
    loaded = loader.load(
        config.model_dir,
        facts,
        gauges,
        is_stopping=is_stopping,
        adapter=config.adapter,
        split=split,
    )
    if loaded.pooling is not None and config.group is not None:
        # Plans say nothing of embeddings: rank 0 would wait in a collective for ranks that never come.
        raise ModelUnusableError(
            f"{config.model_dir}: an embedding model has one rank, and no group"
        )
    loaded = draft_model.add_draft(loaded, config, gauges, is_stopping=is_stopping)
    models = [(loaded.model, facts)]
    if loaded.draft is not None and config.draft_model is not None:
        models.append((loaded.draft, model_files.inspect_model(config.draft_model)))
    # A stage of a pipeline computes whole layers, whatever the number of ranks.
    is_shared = group is not None and group.parallelism == "Tensor"
    ranks = group.world_size if group is not None and is_shared else 1
    return ModelRank(
        config=config,
        gauges=gauges,
        patience=patience,
        loaded=loaded,
        memory=allocation.allocate(models, config, ranks=ranks),
        fellows=fellows,
    )


def free() -> None:
    """Return the memory of a rank which nobody holds any more."""
    allocation.release_wired_memory()
    loader.free()
