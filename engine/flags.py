"""The engine's command line: from flags to its config, or out with a sentence and code 2. Reads nothing else."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import platformdirs

from engine.config import EngineConfig, GroupConfig
from schemas.shardgroup import Backend, Parallelism

_MAX_BODY_BYTES = 8 << 20
_DRAFT_TOKENS = 3
_LAST_PORT = 65535
# Beyond this a guess costs more than it saves: each token is right only if all before it were.
_MOST_DRAFT_TOKENS = 16


def parse(arguments: Sequence[str] | None, *, secret: str = "") -> EngineConfig:
    """Return the flags as a config; end the process with code 2 if they are wrong.

    `secret` is what the ranks of a group know each other by: no flag, for command lines are seen by everybody.
    """
    parser = _parser()
    flags = parser.parse_args(arguments)
    complaint = _conflict_error(flags) or _group_error(flags, secret)
    if complaint:
        parser.error(complaint)
    queue_limit = 4 * flags.concurrency if flags.queue_limit is None else flags.queue_limit
    return EngineConfig(
        model_dir=flags.model_dir,
        replica=flags.replica,
        replica_uid=flags.replica_uid,
        node=flags.node,
        served_names=tuple(dict.fromkeys(flags.served_name)),
        host=flags.host,
        port=flags.port,
        context_length=flags.context_length,
        concurrency=flags.concurrency,
        queue_limit=queue_limit,
        drain_timeout_s=flags.drain_timeout,
        max_body_bytes=flags.max_body_bytes,
        blas_cache=flags.blas_cache,
        kv_bits=flags.kv_bits,
        kv_window=flags.kv_window,
        prefix_cache_bytes=flags.prefix_cache_bytes,
        memory_limit_bytes=flags.memory_limit_bytes,
        adapter=flags.adapter,
        draft_model=flags.draft_model,
        group=_group(flags, secret),
        draft_tokens=_DRAFT_TOKENS if flags.draft_tokens is None else flags.draft_tokens,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine", description="Serve one model.")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--replica", required=True)
    parser.add_argument("--replica-uid", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--served-name", action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, required=True)
    parser.add_argument("--context-length", type=_at_least(2), required=True)
    parser.add_argument("--concurrency", type=_at_least(1), required=True)
    parser.add_argument("--queue-limit", type=_at_least(0), help="default: 4 x concurrency")
    parser.add_argument("--drain-timeout", type=_seconds, default=30.0, help="seconds")
    parser.add_argument("--max-body-bytes", type=_at_least(1), default=_MAX_BODY_BYTES)
    parser.add_argument(
        "--blas-cache", type=Path, default=platformdirs.user_cache_path("mlx-fleet") / "blas"
    )
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="default: not quantized")
    parser.add_argument("--kv-window", type=_at_least(16), help="tokens; default: the model's own")
    parser.add_argument("--prefix-cache-bytes", type=_at_least(0), help="default: what is free")
    parser.add_argument("--memory-limit-bytes", type=_at_least(1), help="default: none")
    parser.add_argument("--adapter", type=Path, help="folder of a LoRA adapter")
    parser.add_argument("--draft-model", type=Path, help="folder of a small model that guesses")
    parser.add_argument(
        "--draft-tokens", type=_draft_tokens, help=f"guesses at once; default: {_DRAFT_TOKENS}"
    )
    parser.add_argument("--rank", type=_at_least(0), help="this process's place in its group")
    parser.add_argument(
        "--world-size", type=_at_least(2), help="how many processes share the model"
    )
    parser.add_argument("--coordinator", help="HOST:PORT at which rank 0 listens to the others")
    parser.add_argument("--epoch", type=_at_least(1), help="which start of the group it is")
    parser.add_argument("--backend", choices=get_args(Backend), help="default: ring")
    parser.add_argument("--parallelism", choices=get_args(Parallelism), help="default: Tensor")
    parser.add_argument("--layers", help="n0,n1,...: each rank's, in rank order; default: evenly")
    parser.add_argument(
        "--join-timeout", type=_seconds, default=120.0, help="seconds to wait for other ranks"
    )
    return parser


def _group_error(flags: argparse.Namespace, secret: str) -> str:
    """Return what is missing or wrong for a group; "" if all is well, or there is to be none."""
    needed = [flags.rank, flags.world_size, flags.coordinator]
    more = [flags.epoch, flags.backend, flags.parallelism, flags.layers]
    if all(one is None for one in needed + more):
        return ""
    if None in needed or not secret:
        return "a group needs --rank, --world-size, --coordinator, and its secret in MLX_FLEET_GROUP_SECRET"
    host, _, port = flags.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        return f"--coordinator must be HOST:PORT, not {flags.coordinator!r}"
    if flags.rank >= flags.world_size:
        return f"--rank {flags.rank} is none of {flags.world_size} ranks, which are counted from 0"
    return _group_conflict(flags) or _layers_error(flags)


def _group_conflict(flags: argparse.Namespace) -> str:
    """Return what does not go with a group; "" if all does."""
    if flags.draft_model is not None:
        return "--draft-model does not go with --world-size: only rank 0 would guess; leave one out"
    if flags.adapter is not None:
        return (
            "--adapter does not go with --world-size: mlx-lm cannot split its layers; leave one out"
        )
    return ""


def _layers_error(flags: argparse.Namespace) -> str:
    """Return what is wrong with the split; "" if nothing is."""
    if flags.layers is None:
        return ""
    if flags.parallelism != "Pipeline":
        return "--layers goes with --parallelism Pipeline only: Tensor splits every layer"
    parts = flags.layers.split(",")
    if len(parts) != flags.world_size or not all(
        part.isdecimal() and int(part) > 0 for part in parts
    ):
        return (
            f"--layers must be {flags.world_size} numbers from 1 up with commas between, one a rank, "
            f"not {flags.layers!r}"
        )
    return ""


def _group(flags: argparse.Namespace, secret: str) -> GroupConfig | None:
    if flags.rank is None:
        return None
    host, _, port = flags.coordinator.rpartition(":")
    return GroupConfig(
        rank=flags.rank,
        world_size=flags.world_size,
        host=host.strip("[]"),
        port=int(port),
        secret=secret,
        epoch=flags.epoch or 1,
        backend=flags.backend or "ring",
        parallelism=flags.parallelism or "Tensor",
        layers=tuple(int(part) for part in flags.layers.split(",")) if flags.layers else (),
        timeout_s=flags.join_timeout,
    )


def _conflict_error(flags: argparse.Namespace) -> str:
    """Return which flags do not go together, as `schemas/deployment.py` refuses their fields; "" if all do."""
    if flags.kv_window is not None and flags.kv_bits is not None:
        return "--kv-window does not go with --kv-bits: a cache that rotates cannot be quantized"
    if flags.kv_window is not None and flags.draft_model is not None:
        return "--kv-window does not go with --draft-model: guesses could not be taken back"
    if flags.kv_window is not None and flags.kv_window >= flags.context_length:
        return "--kv-window must be less than --context-length: nothing would ever leave the window"
    if flags.draft_tokens is not None and flags.draft_model is None:
        return "--draft-tokens needs --draft-model: there is nobody to guess"
    return ""


def _draft_tokens(text: str) -> int:
    value = _at_least(1)(text)
    if value > _MOST_DRAFT_TOKENS:
        raise argparse.ArgumentTypeError(f"{value} is more than {_MOST_DRAFT_TOKENS}")
    return value


def _port(text: str) -> int:
    value = _at_least(1)(text)
    if value > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{value} is more than {_LAST_PORT}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds from 0 up")
    return value


def _at_least(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
        return value

    return integer
