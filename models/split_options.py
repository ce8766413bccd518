"""The ways in which the installed mlx-lm can split a model over several Macs, found out by a child process.

The child (engine/shape_probe.py) builds the model without its weights, which takes seconds, most of them imports. A
caller never waits for it: a later call returns the answer. One child runs at a time. Must not import mlx.
"""

import hashlib
import importlib.metadata
import os
import random
import shutil
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
from models import cache_rules, weight_headers
from models.cache_rules import NotUnderstoodError
from models.model_files import ModelFacts
from models.weight_headers import WeightHeaders
from schemas.node import ModelGeometry, SplitOptions
from schemas.wire import engine_config

# Increased when the child's answer changes in form or meaning: stored answers of the old version are discarded.
_FORMAT_VERSION: Final = 1
# The child ends by itself after 300 s, unless it is frozen.
_TIMEOUT_S: Final = 330.0
# A retry costs seconds of a core; a person may have mended the model meanwhile, or the Mac may be less busy.
_RETRIES: Final = Backoff(first_s=30.0, limit_s=600.0)
# Errors of mlx-lm are quoted up to this length.
_MAX_QUOTE_CHARACTERS: Final = 120


class SplitWeights(BaseModel):
    """Bytes of a part of a model's weights."""

    total_bytes: int
    half_bytes: int
    """The part that is float16 or bfloat16."""

    def in_memory(self, *, casts_to_float32: bool) -> int:
        """Return the bytes of these weights in an engine."""
        return self.total_bytes + (self.half_bytes if casts_to_float32 else 0)


class SplitShapes(BaseModel):
    """The child's answer for one model."""

    tensor: dict[int, SplitWeights]
    """The weights of one rank, for each number of ranks over which every layer can be split."""
    refused: dict[int, str]
    """mlx-lm's error for other numbers of ranks; empty if the architecture cannot be split at all."""
    layers: tuple[SplitWeights, ...]
    """The weights of each layer in order; empty if whole layers cannot be distributed."""
    rest: SplitWeights
    """The weights that every rank has beside its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFailure:
    """No answer could be obtained."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningInspection:
    """A child that runs."""

    key: str
    child: processes.ChildProcess
    output: Path
    """The file with the child's output."""
    deadline: float
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FailedInspection:
    why: str
    times: int
    retry_at: float


class SplitInspector:
    """Returns and stores how models can be split. Thread-safe."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """`folder` stores answers from one agent run to the next."""
        self._folder = folder
        self._clock = clock
        self._known: dict[str, SplitShapes] = {}
        self._failures: dict[str, _FailedInspection] = {}
        self._running: _RunningInspection | None = None
        self._lock = threading.Lock()

    def inspect(
        self, model: Path, facts: ModelFacts, headers: str = ""
    ) -> SplitShapes | SplitFailure | None:
        """Return how the model in the folder can be split; None while that is being found out.

        `headers` are those of a model whose files are not in the folder yet, packed; "" for one that is there.
        """
        with self._lock:
            self._collect()
            try:
                skeleton = weight_headers.unpack(headers) if headers else None
                config = _read_config(model) if skeleton is None else skeleton.config.encode()
            except ValueError as error:
                return SplitFailure(why=str(error))
            parts = (
                _FORMAT_VERSION,
                _package_version("mlx-lm"),
                _package_version("mlx"),
                repr(facts.weights),
            )
            key = hashlib.sha256(repr(parts).encode() + config).hexdigest()[:32]
            split_shapes = self._known.get(key) or self._stored(key)
            if split_shapes is not None:
                return split_shapes
            failure = self._failures.get(key)
            is_due = failure is None or self._clock.monotonic() >= failure.retry_at
            if is_due and self._running is None:
                self._start(key, model, skeleton)
                failure = self._failures.get(key)
            return None if failure is None else SplitFailure(why=failure.why)

    def is_inspecting(self) -> bool:
        """Return whether an answer is being obtained, or has just arrived: then it is worth asking again soon."""
        with self._lock:
            was_running = self._running is not None
            self._collect()
            return was_running

    def _stored(self, key: str) -> SplitShapes | None:
        try:
            split_shapes = SplitShapes.model_validate_json(
                (self._folder / f"{key}.json").read_bytes()
            )
        except (OSError, ValidationError):
            return None  # no answer yet, or a damaged file: a new inspection replaces it
        self._known[key] = split_shapes
        return split_shapes

    def _start(self, key: str, model: Path, skeleton: WeightHeaders | None) -> None:
        output = self._folder / "looking.log"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            output.unlink(missing_ok=True)
            if skeleton is not None:
                model = self._folder / "skeleton"
                shutil.rmtree(model, ignore_errors=True)
                model.mkdir()
                (model / "config.json").write_text(skeleton.config)
                every = {
                    name: one
                    for tensors in skeleton.files.values()
                    for name, one in tensors.items()
                }
                weight_headers.write_skeleton(model / "model.safetensors", every)
            module = engine_config.SHAPE_PROBE_MODULE
            argv = [sys.executable, "-m", module, str(model), str(os.getpid())]
            child = processes.spawn(argv, log=output, cwd=self._folder)
        except OSError as error:
            self._fail(key, f"no process could be started for it: {error}")
            return
        deadline = self._clock.monotonic() + _TIMEOUT_S
        self._running = _RunningInspection(key=key, child=child, output=output, deadline=deadline)

    def _collect(self) -> None:
        """Take the answer of a child that has ended; kill one that is over its deadline."""
        running = self._running
        if running is None:
            return
        if running.child.running():
            if self._clock.monotonic() > running.deadline:
                running.child.send(signal.SIGKILL)
                self._running = None
                self._fail(running.key, f"it was not done within {_TIMEOUT_S:.0f} s")
            return
        self._running = None
        shutil.rmtree(self._folder / "skeleton", ignore_errors=True)
        last_line = processes.last_lines(running.output, 1)
        if running.child.exit_code() != 0:
            why = last_line or f"the child ended with {running.child.exit_code()}"
            self._fail(running.key, why)
            return
        try:
            shapes = SplitShapes.model_validate_json(running.output.read_text().splitlines()[-1])
            write_atomically(self._folder / f"{running.key}.json", shapes.model_dump_json())
        except (OSError, ValueError, LookupError) as error:
            self._fail(running.key, f"{last_line[:200]}: {error}")
            return
        self._known[running.key] = shapes

    def _fail(self, key: str, why: str) -> None:
        times = self._failures[key].times + 1 if key in self._failures else 1
        retry_at = self._clock.monotonic() + _RETRIES.delay_s(times, jitter=random.random())
        text = " ".join(why.split())[:300]
        self._failures[key] = _FailedInspection(why=text, times=times, retry_at=retry_at)


def _read_config(model: Path) -> bytes:
    try:
        return (model / "config.json").read_bytes()
    except OSError:
        return b""  # it has just vanished: the child will report it


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def splitting_report(
    facts: ModelFacts,
    geometry: ModelGeometry,
    found: SplitShapes | SplitFailure | None,
    *,
    casts_to_float32: bool,
) -> SplitOptions | None:
    """Return the part of a model's report that says how it can be split; None while that is unknown."""
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
    """Return what decides over the split: heads, and mlx-lm's error for a number that divides the heads."""
    heads, kv_heads = facts.config.num_attention_heads or 0, geometry.kv_heads
    parts = [
        facts.model_type,
        *([f"{heads} heads"] if heads else []),
        *([f"{kv_heads} KV heads"] if kv_heads else []),
    ]
    basis = ", ".join(parts)
    dividing = [n for n in found.refused if heads % n == 0 and kv_heads % n == 0]
    if not heads or not dividing:
        return basis
    first = min(dividing)
    return f"{basis} (with {first}: {found.refused[first][:_MAX_QUOTE_CHARACTERS]})"
