"""Over how many Macs the installed mlx-lm can split a model: asks a child process, and remembers what it said.

The child (engine/shape_probe.py) builds the model without reading its weights, which takes seconds, most of
them imports. Nobody waits for it: whoever asks again later gets the answer. One runs at a time. Must not import mlx.

From what mlx-lm said of a model to what the agent reports: over how many Macs it can be split. Pure.
"""

import hashlib
import importlib.metadata
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from machinery import processes
from machinery.backoff import Backoff
from machinery.clock import Clock
from machinery.files import write_atomically
from models import cache_rules
from models.cache_rules import NotUnderstoodError
from models.model_files import ModelFacts
from schemas.node import ModelGeometry, SplitOptions

# Goes up when the child says more, or something else: what an older one said is then asked for anew.
_FORMAT_VERSION: Final = 1
# The child ends by itself after 300 s; but a frozen one does not.
_TIMEOUT_S: Final = 330.0
# Looking again costs seconds of a core; but a person may have mended what was wrong, or the Mac be less busy.
_RETRIES: Final = Backoff(first_s=30.0, limit_s=600.0)
_CHILD_MODULE: Final = "engine.shape_probe"


class SplitWeights(BaseModel):
    """What some arrays take."""

    total_bytes: int
    half_bytes: int
    """How many of them are float16 or bfloat16."""

    def in_memory(self, *, casts_to_float32: bool) -> int:
        """Return the bytes that they take in an engine."""
        return self.total_bytes + (self.half_bytes if casts_to_float32 else 0)


class SplitShapes(BaseModel):
    """What the child said of one model."""

    tensor: dict[int, SplitWeights]
    """For each number of ranks over which every layer can be split, one rank's weights."""
    refused: dict[int, str]
    """Why other numbers of ranks cannot, in mlx-lm's words; none where the architecture cannot at all."""
    layers: tuple[SplitWeights, ...]
    """Each layer's weights, the first one first; none where whole layers cannot be dealt out."""
    rest: SplitWeights
    """What every rank has besides its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFailure:
    """Nothing could be found out."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningInspection:
    """A child that runs."""

    key: str
    child: processes.ChildProcess
    said: Path
    """The file that it writes to."""
    until: float
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedInspection:
    why: str
    times: int
    again_at: float


class SplitInspector:
    """Knows how models can be split. Several threads may ask."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """`folder` keeps answers from one agent to the next."""
        self._folder = folder
        self._clock = clock
        self._known: dict[str, SplitShapes] = {}
        self._failures: dict[str, _FailedInspection] = {}
        self._look: _RunningInspection | None = None
        self._lock = threading.Lock()

    def ask(self, model: Path, facts: ModelFacts) -> SplitShapes | SplitFailure | None:
        """Return how the model in the folder can be split; None while that is being found out."""
        with self._lock:
            self._collect()
            key = _cache_key(model, facts)
            found = self._known.get(key) or self._kept(key)
            if found is not None:
                return found
            failure = self._failures.get(key)
            is_due = failure is None or self._clock.monotonic() >= failure.again_at
            if is_due and self._look is None:
                self._begin(key, model)
                failure = self._failures.get(key)
            return None if failure is None else SplitFailure(why=failure.why)

    def is_looking(self) -> bool:
        """Return whether an answer is under way, or has just come: so that it is worth asking again soon."""
        with self._lock:
            was_looking = self._look is not None
            self._collect()
            return was_looking

    def _kept(self, key: str) -> SplitShapes | None:
        try:
            found = SplitShapes.model_validate_json((self._folder / f"{key}.json").read_bytes())
        except (OSError, ValidationError):
            return None  # nobody looked yet, or the disk lost some of it: looking again mends both
        self._known[key] = found
        return found

    def _begin(self, key: str, model: Path) -> None:
        said = self._folder / "looking.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            said.unlink(missing_ok=True)
            argv = [sys.executable, "-m", _CHILD_MODULE, str(model), str(os.getpid())]
            child = processes.spawn(argv, log=said, cwd=self._folder)
        except OSError as error:
            self._fail(key, f"no process could be started for it: {error}")
            return
        until = self._clock.monotonic() + _TIMEOUT_S
        self._look = _RunningInspection(key=key, child=child, said=said, until=until)

    def _collect(self) -> None:
        """Take what the child said if it is done; end it if it takes too long."""
        look = self._look
        if look is None:
            return
        if look.child.running():
            if self._clock.monotonic() > look.until:
                look.child.send(signal.SIGKILL)
                self._look = None
                self._fail(look.key, f"it was not done within {_TIMEOUT_S:.0f} s")
            return
        self._look = None
        said = processes.last_lines(look.said, 1)
        if look.child.exit_code() != 0:
            self._fail(look.key, said or f"the child ended with {look.child.exit_code()}")
            return
        try:
            found = SplitShapes.model_validate_json(look.said.read_text().splitlines()[-1])
            write_atomically(self._folder / f"{look.key}.json", found.model_dump_json())
        except (OSError, ValueError, LookupError) as error:
            self._fail(look.key, f"{said[:200]}: {error}")
            return
        self._known[look.key] = found

    def _fail(self, key: str, why: str) -> None:
        times = self._failures[key].times + 1 if key in self._failures else 1
        again_at = self._clock.monotonic() + _RETRIES.delay_s(times)
        words = " ".join(why.split())[:300]
        self._failures[key] = _FailedInspection(why=words, times=times, again_at=again_at)


def _cache_key(model: Path, facts: ModelFacts) -> str:
    """Return what tells one answer from another: versions, the model's config, and what its tensors add up to."""
    try:
        config = (model / "config.json").read_bytes()
    except OSError:
        config = b""  # it vanished this very moment: the child will say so
    said = (
        _FORMAT_VERSION,
        _package_version("mlx-lm"),
        _package_version("mlx"),
        repr(facts.weights),
    )
    return hashlib.sha256(repr(said).encode() + config).hexdigest()[:32]


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


# A complaint of mlx-lm is quoted up to here.
_MAX_QUOTE_CHARACTERS: Final = 120


def splitting_report(
    facts: ModelFacts,
    geometry: ModelGeometry,
    found: SplitShapes | SplitFailure | None,
    *,
    casts_to_float32: bool,
) -> SplitOptions | None:
    """Return how the model can be split; None while nobody knows."""
    if found is None:
        return None
    if isinstance(found, SplitFailure):
        return SplitOptions(unknown=found.why, basis=facts.model_type)
    sizes = sorted(found.tensor)
    return SplitOptions(
        tensor=tuple(sizes),
        tensor_bytes=tuple(
            found.tensor[size].in_memory(casts_to_float32=casts_to_float32) for size in sizes
        ),
        is_pipelined=bool(found.layers),
        layer_bytes=tuple(
            layer.in_memory(casts_to_float32=casts_to_float32) for layer in found.layers
        ),
        rest_bytes=found.rest.in_memory(casts_to_float32=casts_to_float32),
        layer_groups=_layer_order(facts, geometry) if found.layers else (),
        basis=_split_basis(facts, geometry, found),
    )


def _layer_order(facts: ModelFacts, geometry: ModelGeometry) -> tuple[int, ...]:
    try:
        return cache_rules.layer_order(
            facts.module, facts.config, element_bytes=geometry.kv_element_bytes
        )
    except NotUnderstoodError:
        return ()


def _split_basis(facts: ModelFacts, geometry: ModelGeometry, found: SplitShapes) -> str:
    """Return what decides: heads, and what else stands in the way of sizes that divide the heads."""
    heads, kv_heads = facts.config.num_attention_heads or 0, geometry.kv_heads
    said = [
        facts.model_type,
        *([f"{heads} heads"] if heads else []),
        *([f"{kv_heads} KV heads"] if kv_heads else []),
    ]
    basis = ", ".join(said)
    dividing = [n for n in found.refused if heads % n == 0 and kv_heads % n == 0]
    if not heads or not dividing:
        return basis
    first = min(dividing)
    return f"{basis} (with {first}: {found.refused[first][:_MAX_QUOTE_CHARACTERS]})"
