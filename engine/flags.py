"""The engine's configuration from its command line: fills in defaults, and adds the secret of a group."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import platformdirs

from engine.config import EngineConfig, GroupConfig
from schemas.sampling import Sampling
from schemas.wire.body_limits import MOST_LIMIT
from schemas.wire.engine_flags import EngineFlags
from schemas.wire.exit_codes import ExitCode

_T = TypeVar("_T")

_DRAIN_TIMEOUT_S = 30.0
_JOIN_TIMEOUT_S = 120.0
_DRAFT_TOKENS = 3
_INPUT_LIMIT_S = 2.0
# Requests in the queue for each that runs.
_QUEUED_PER_RUNNING = 4


def parse(arguments: Sequence[str] | None, *, read_secret: Callable[[], str] = str) -> EngineConfig:
    """Return the configuration in `arguments`, or in `sys.argv` for None.

    Exits the process with code 2 and a line on stderr if the flags are wrong. `read_secret` is called
    for a rank of a group, and returns what authenticates the ranks to each other. It is no flag, because other users
    of a machine can read command lines.
    """
    flags = EngineFlags.from_argv(arguments)
    secret = read_secret() if flags.is_grouped else ""
    if flags.is_grouped and not secret:
        sys.stderr.write("engine: error: a rank needs the secret of its group on stdin\n")
        sys.exit(ExitCode.UNUSABLE)
    return EngineConfig(
        model_dir=flags.model_dir,
        replica=flags.replica,
        replica_uid=flags.replica_uid,
        node=flags.node,
        served_names=flags.served_names,
        address=flags.address(),
        context_length=flags.context_length,
        concurrency=flags.concurrency,
        queue_limit=_or(flags.queue_limit, _QUEUED_PER_RUNNING * flags.concurrency),
        drain_timeout_s=_or(flags.drain_timeout_s, _DRAIN_TIMEOUT_S),
        max_body_bytes=_or(flags.max_body_bytes, MOST_LIMIT),
        input_limit_s=_or(flags.input_limit_s, _INPUT_LIMIT_S),
        blas_cache=flags.blas_cache or platformdirs.user_cache_path("mlx-fleet") / "blas",
        sampling=flags.sampling or Sampling(),
        refuses_unknown=flags.unknown_parameters == "Refuse",
        always_performance=flags.performance == "Always",
        vision=flags.vision,
        kv_tokens=flags.kv_tokens,
        kv_bits=flags.kv_bits,
        kv_window=flags.kv_window,
        kv_keep=_or(flags.kv_keep, 0),
        prefix_cache_bytes=flags.prefix_cache_bytes,
        prefix_disk_bytes=_or(flags.prefix_disk_bytes, 0),
        prefix_disk_dir=flags.prefix_disk_dir
        or platformdirs.user_cache_path("mlx-fleet") / "prefix-cache",
        memory_limit_bytes=flags.memory_limit_bytes,
        identity_dir=flags.identity_dir,
        adapter=flags.adapter,
        adapters=flags.adapters(),
        draft_model=flags.draft_model,
        draft_tokens=_or(flags.draft_tokens, _DRAFT_TOKENS),
        ngram_tokens=_or(flags.ngram_tokens, 0),
        mtp_tokens=_or(flags.mtp_tokens, 0),
        group=_group(flags, secret),
    )


def _group(flags: EngineFlags, secret: str) -> GroupConfig | None:
    if flags.rank is None or flags.world_size is None:
        return None
    host, port = flags.coordinator_address()
    return GroupConfig(
        rank=flags.rank,
        world_size=flags.world_size,
        host=host,
        port=port,
        secret=secret,
        epoch=flags.epoch or 1,
        backend=flags.backend or "ring",
        parallelism=flags.parallelism or "Tensor",
        layers=flags.layers or (),
        timeout_s=_or(flags.join_timeout_s, _JOIN_TIMEOUT_S),
    )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
