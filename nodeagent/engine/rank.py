"""One process of a model's: loads its share of it, and then leads or follows. The worker's thread alone; imports mlx.

A model on one machine has one rank, which leads nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nodeagent import modeldir
from nodeagent.engine.batch import making
from nodeagent.engine.batch.batch import Batch
from nodeagent.engine.batch.executor import Executor
from nodeagent.engine.config import EngineConfig
from nodeagent.engine.memory import beginning, budget, limits
from nodeagent.engine.memory.guard import Memory
from nodeagent.engine.model import connecting, draft, loading
from nodeagent.engine.model.loading import Loaded
from nodeagent.engine.model.sharding import Split
from nodeagent.engine.openai import fingerprint
from nodeagent.engine.ports import Listener, Ready
from nodeagent.engine.ranks import agreeing, meeting
from nodeagent.engine.ranks.follower import Follower
from nodeagent.engine.ranks.meeting import Link, Patience
from nodeagent.engine.ranks.words import Begin, Hello
from nodeagent.engine.state import Gauges
from nodeagent.modeldir import ModelFacts, ModelUnusableError

# More than anybody has room for: JSON has no infinity.
_AMPLE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fellows:
    """The other ranks of this one's group, connected."""

    link: Link
    group: Any
    """An mx.distributed.Group."""


@dataclass(slots=True, kw_only=True)
class Rank:
    """A model in memory, or this rank's share of it."""

    config: EngineConfig
    gauges: Gauges
    patience: Patience
    loaded: Loaded
    memory: Memory
    fellows: Fellows | None = None

    @property
    def ready(self) -> Ready:
        """What the event loop needs to make jobs."""
        return Ready(
            codec=self.loaded.codec,
            vocab_size=self.loaded.vocab_size,
            pooling=self.loaded.pooling,
            has_head=self.loaded.has_head,
            grammars=self.loaded.grammars,
            budget=self.memory.budget,
        )

    def lead(self) -> Batch:
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
            begin = agreeing.agree(hellos)
            self.memory = Memory(budget=self._narrowed(hellos))
            others.begin(begin)
        executor = self._executor(begin)
        batch = making.make(self.loaded, executor, self.memory, self.gauges, self.patience.clock)
        batch.others = others
        return batch

    def follow(self, listener: Listener) -> None:
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

    def _executor(self, begin: Begin) -> Executor:
        return making.make_executor(
            self.loaded,
            self.config,
            prefix_bytes=begin.prefix_bytes,
            token_bytes=begin.token_bytes,
        )

    def _own(self) -> Begin:
        return Begin(prefix_bytes=self.memory.budget.prefix_most_bytes, token_bytes=None)

    def _hello(self, rank: int) -> Hello:
        config, found = self.config, self.memory.budget
        shaping = (config.kv_bits, config.kv_window)
        full = budget.full_bytes(found.rule, found.load)
        return Hello(
            rank=rank,
            model=fingerprint.of(config.model_dir, shaping),
            prefix_bytes=found.prefix_most_bytes,
            token_bytes=found.rule.token_bytes,
            is_even=not (found.rule.constant_bytes or found.rule.windows),
            room=min(_AMPLE, found.kv_bytes / full) if full else _AMPLE,
        )

    def _narrowed(self, hellos: Sequence[Hello]) -> budget.Budget:
        """Return the budget with no more room for requests than the rank has that has least."""
        found = self.memory.budget
        full = budget.full_bytes(found.rule, found.load)
        room = int(agreeing.room(hellos) * full)
        return replace(found, kv_bytes=min(found.kv_bytes, room))


def meet(
    config: EngineConfig, gauges: Gauges, patience: Patience, listener: Listener
) -> Fellows | None:
    """Connect this rank to the others; None: it has none.

    Raises:
        GroupError: they do not come, or cannot be connected.
        StoppedError: this process is to end.

    """
    if config.group is None:
        return None
    gauges.is_waiting = True
    link = meeting.meet(config.group, patience)
    listener.on_met(link.lines)
    link.go(patience)
    group = connecting.connect(config.group, patience.pause)
    gauges.is_waiting = False
    listener.on_loading()
    return Fellows(link=link, group=group)


def load(
    config: EngineConfig,
    facts: ModelFacts,
    gauges: Gauges,
    patience: Patience,
    fellows: Fellows | None = None,
) -> Rank:
    """Load what the config names, and share the memory out.

    Raises:
        ModelUnusableError: it cannot be served.
        StoppedError: this process is to end.

    """
    group, is_stopping = config.group, patience.is_stopping
    split = None
    if fellows is not None and group is not None:
        split = Split(group=fellows.group, parallelism=group.parallelism, layers=group.layers)
    loaded = loading.load(
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
    loaded = draft.with_draft(loaded, config, gauges, is_stopping=is_stopping)
    models = [(loaded.model, facts)]
    if loaded.draft is not None and config.draft_model is not None:
        models.append((loaded.draft, modeldir.inspect(config.draft_model)))
    # A stage of a pipeline computes whole layers, whatever the number of ranks.
    is_shared = group is not None and group.parallelism == "Tensor"
    ranks = group.world_size if group is not None and is_shared else 1
    return Rank(
        config=config,
        gauges=gauges,
        patience=patience,
        loaded=loaded,
        memory=beginning.begin(models, config, ranks=ranks),
        fellows=fellows,
    )


def free() -> None:
    """Return the memory of a rank which nobody holds any more."""
    limits.release()
    loading.free()
