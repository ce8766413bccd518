"""One rank of a model: loads its part, then leads the group or follows rank 0. Worker thread only; imports mlx.

A model on one machine is a single rank that leads no others.
"""

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from engine.batch.embedder import Embedder
from engine.batch.executor import StepExecutor
from engine.batch.hidden_states import HiddenStates
from engine.batch.loop import BatchLoop
from engine.batch.mtp import GuessPolicy, MtpProposer
from engine.batch.ngram import NgramProposer
from engine.batch.speculative import DraftProposer, TokenProposer
from engine.cache.interface import KvOptions
from engine.cache.layer_caches import can_read_rows, make_caches
from engine.cache.prefix_cache import BlockPrefixCache
from engine.gauges import Gauges
from engine.memory import allocation
from engine.memory.budget import MemoryBudget, full_bytes
from engine.memory.guard import MemoryGuard
from engine.model import disk_cache, draft_model, loader, mlx_group, mtp_head
from engine.model.loader import LoadedModel, LoadOptions
from engine.model.mlx_group import ModelSplit
from engine.ports import ServedModel, WorkerListener
from engine.ranks import coordinator, rendezvous
from engine.ranks.follower import Follower
from engine.ranks.messages import LoadedMessage, StartMessage
from engine.ranks.rendezvous import RankLink, WaitContext
from machinery.clock import Clock
from models import fingerprint, model_files
from models.footprint import CHECKPOINT_STEP
from models.model_files import ModelFacts, ModelUnusableError
from schemas.memory import Wired
from schemas.wire.engine_config import EngineConfig

log = logging.getLogger(__name__)

# Larger than any real share of memory; JSON has no infinity.
_AMPLE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGroup:
    """The connected group of this rank."""

    link: RankLink
    group: Any
    """An mx.distributed.Group."""


@dataclass(slots=True, kw_only=True)
class ModelRank:
    """A model in memory, or this rank's part of it."""

    config: EngineConfig
    gauges: Gauges
    wait: WaitContext
    loaded: LoadedModel
    memory: MemoryGuard
    peers: PeerGroup | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The content of each adapter that requests choose, by served name."""

    @property
    def served_model(self) -> ServedModel:
        """The values that the event loop needs to make jobs."""
        return ServedModel(
            codec=self.loaded.codec,
            vocab_size=self.loaded.vocab_size,
            pooling=self.loaded.pooling,
            has_head=self.loaded.has_head,
            grammars=self.loaded.grammars,
            adapters=self.adapters,
            image_rules=self.loaded.image_rules,
            budget=self.memory.budget,
        )

    def lead(self) -> BatchLoop:
        """Return an idle batch loop, once all other ranks have loaded.

        Raises:
            GroupError: another rank is gone.
            StoppedError: this process must end.

        """
        start, others = self._start_alone(), None
        if self.peers is not None and self.peers.link.coordinator is not None:
            others = self.peers.link.coordinator
            own = self._loaded_message(0)
            self.gauges.is_waiting = True
            ranks = [own, *others.receive_loaded(self.wait.is_stopping)]
            self.gauges.is_waiting = False
            start = coordinator.agree(ranks)
            self.memory = MemoryGuard(budget=self._shared_budget(ranks, start))
            others.send_start(start)
        executor = self._executor(start)
        batch = make_batch_loop(self.loaded, executor, self.memory, self.gauges, self.wait.clock)
        batch.peers = others
        return batch

    def follow(self, listener: WorkerListener) -> None:
        """Execute rank 0's plans until it stops this rank.

        Raises:
            GroupError: rank 0 is gone, or this rank differs from it.
            StoppedError: this process must end, and rank 0 did not say so.

        """
        assert self.config.group is not None
        assert self.peers is not None
        link = self.peers.link
        assert link.channel is not None
        self.gauges.is_waiting = True
        start = link.report_loaded(self._loaded_message(self.config.group.rank), self.wait)
        listener.on_ready(self.served_model)
        with link.channel:
            Follower(
                channel=link.channel,
                executor=self._executor(start),
                gauges=self.gauges,
                wait=self.wait,
            ).run()

    def _executor(self, start: StartMessage) -> StepExecutor:
        return make_executor(
            self.loaded,
            self.config,
            prefix_bytes=start.prefix_bytes,
            token_bytes=start.token_bytes,
            checkpoint_tokens=self.memory.budget.footprint.checkpoint_tokens,
            by_rows=start.by_rows,
        )

    def _start_alone(self) -> StartMessage:
        budget = self.memory.budget
        return StartMessage(
            prefix_bytes=budget.prefix_most_bytes,
            token_bytes=None,
            by_rows=budget.footprint.by_rows,
        )

    def _loaded_message(self, rank: int) -> LoadedMessage:
        config, budget = self.config, self.memory.budget
        settings = (config.kv_cache.bits, config.window_setting)
        full = full_bytes(budget.footprint, budget.load)
        return LoadedMessage(
            rank=rank,
            model=fingerprint.compute(config.model_dir, settings),
            prefix_bytes=budget.prefix_most_bytes,
            token_bytes=budget.footprint.token_bytes,
            checkpoint_tokens=budget.footprint.checkpoint_tokens,
            room=min(_AMPLE, budget.kv_bytes / full) if full else _AMPLE,
            by_rows=budget.footprint.by_rows,
        )

    def _shared_budget(self, ranks: Sequence[LoadedMessage], start: StartMessage) -> MemoryBudget:
        """Return the budget, limited to the room that every rank has for requests."""
        budget = self.memory.budget
        full = full_bytes(budget.footprint, budget.load)
        room = int(coordinator.smallest_kv_share(ranks) * full)
        footprint = replace(budget.footprint, by_rows=start.by_rows)
        return replace(budget, footprint=footprint, kv_bytes=min(budget.kv_bytes, room))


def make_executor(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    prefix_bytes: int,
    token_bytes: int | None = None,
    checkpoint_tokens: int = CHECKPOINT_STEP,
    by_rows: bool = False,
) -> StepExecutor:
    """Return the executor of a rank.

    `prefix_bytes` is the limit of its prefix cache; `token_bytes` is the size of a token there, None for the real size,
    and `checkpoint_tokens` the distance of checkpoints, if the model needs any. `by_rows` says that the caches of a batch may be kept row by row.
    """
    cache = config.kv_cache
    options = KvOptions(bits=cache.bits, window=cache.window, keep=cache.keep or 0)
    model = loaded.model
    proposer: TokenProposer | None = None
    if config.ngram_tokens:
        proposer = NgramProposer(count=config.ngram_tokens)
    elif loaded.draft is not None:
        proposer = DraftProposer(model=loaded.draft, count=config.draft_tokens)
    elif loaded.mtp_head is not None:
        model = HiddenStates(loaded.model)
        policy = GuessPolicy(count=config.mtp_tokens)
        proposer = MtpProposer(head=loaded.mtp_head, states=model, policy=policy)
    return StepExecutor(
        model=model,
        ends=frozenset(loaded.codec.eos_ids),
        prefix=BlockPrefixCache(
            lambda: make_caches(loaded.model, options),
            limit_bytes=prefix_bytes,
            token_bytes=token_bytes,
            checkpoint_tokens=checkpoint_tokens,
            disk=disk_cache.open_disk(config) if prefix_bytes else None,
        ),
        grammars=loaded.grammars,
        proposer=proposer,
        adapters=loaded.adapters,
        vision=None if loaded.image_rules is None else loaded.model,
        by_rows=by_rows,
        reads_rows=by_rows and can_read_rows(loaded.model, options),
    )


def make_batch_loop(
    loaded: LoadedModel, executor: StepExecutor, memory: MemoryGuard, gauges: Gauges, clock: Clock
) -> BatchLoop:
    """Return an idle batch loop."""
    embedder = None if loaded.pooling is None else Embedder(loaded.model, loaded.pooling)
    return BatchLoop(
        executor=executor, memory=memory, gauges=gauges, clock=clock, embedder=embedder
    )


def connect_group(
    config: EngineConfig, gauges: Gauges, wait: WaitContext, listener: WorkerListener
) -> PeerGroup | None:
    """Connect this rank to the others; return None if the config has no group.

    Raises:
        GroupError: the other ranks do not come, or cannot be connected.
        StoppedError: this process must end.

    """
    if config.group is None:
        return None
    gauges.is_waiting = True
    link = rendezvous.join_group(config.group, wait)
    listener.on_met(link.lifelines)
    link.start_connecting(wait)
    group = mlx_group.init_group(config.group, wait.pause)
    gauges.is_waiting = False
    listener.on_loading()
    return PeerGroup(link=link, group=group)


def load(
    config: EngineConfig,
    facts: ModelFacts,
    gauges: Gauges,
    wait: WaitContext,
    peers: PeerGroup | None = None,
) -> ModelRank:
    """Load the model of the config, or this rank's part of it, and divide the memory.

    Raises:
        ModelUnusableError: the model cannot be served.
        StoppedError: this process must end.

    """
    group, is_stopping = config.group, wait.is_stopping
    split = None
    if peers is not None and group is not None:
        split = ModelSplit(group=peers.group, parallelism=group.parallelism, layers=group.layers)
    # An adapter with several names is loaded once.
    contents = {name: disk_cache.digest_folder(one) for name, one in config.adapters.items()}
    folders = {contents[name]: folder for name, folder in config.adapters.items()}
    loaded = loader.load(
        config.model_dir,
        facts,
        gauges,
        is_stopping=is_stopping,
        options=LoadOptions(adapter=folders or config.adapter, split=split, vision=config.vision),
    )
    if loaded.pooling is not None and config.group is not None:
        # Step plans contain no embeddings: rank 0 would wait in a collective for ranks that never come.
        raise ModelUnusableError(
            f"{config.model_dir}: an embedding model cannot be split over a group of ranks"
        )
    if config.ngram_tokens:
        draft_model.check_guesses(loaded, "spec.model.ngram")
    loaded = mtp_head.add_head(loaded, facts, config, gauges, is_stopping=is_stopping)
    loaded = draft_model.add_draft(loaded, config, gauges, is_stopping=is_stopping)
    models = [(loaded.model, facts)]
    if loaded.draft is not None and config.draft_model is not None:
        models.append((loaded.draft, model_files.inspect_model(config.draft_model)))
    # A pipeline stage computes whole layers, whatever the number of ranks.
    is_shared = group is not None and group.parallelism == "Tensor"
    ranks = group.world_size if group is not None and is_shared else 1
    return ModelRank(
        config=config,
        gauges=gauges,
        wait=wait,
        loaded=loaded,
        memory=allocation.allocate(models, config, ranks=ranks),
        peers=peers,
        adapters=contents,
    )


def free(wired: Wired) -> None:
    """Free the memory of a rank without references; `wired` is that of its configuration."""
    if wired != "Off":
        allocation.release_wired_memory()
    gc.unfreeze()  # the service froze all objects when the model was ready, the model included
    gc.collect()
    allocation.clear_buffers()
    log.info("model unloaded", extra={"active_bytes": mx.get_active_memory()})
