"""The engine's command line: one table that the agent writes and the engine parses.

    argv = [sys.executable, "-m", engine_flags.MODULE, *EngineFlags(model_dir=..., ...).to_argv()]
    flags = EngineFlags.from_argv(sys.argv[1:])

A field of None is not written: the engine then takes its own default (engine/flags.py).
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from schemas.sampling import Performance, Sampling, UnknownParameters
from schemas.shardgroup import Backend, Parallelism
from schemas.vision import Vision
from schemas.wire.engine_address import EngineAddress

MODULE: Final = "engine"
"""`python -m engine` runs one engine."""
GOLDEN_MODULE: Final = "engine.golden"
"""`python -m engine.golden` answers the golden question alone; it takes the flags that describe the model."""
SHAPE_PROBE_MODULE: Final = "engine.shape_probe"
"""`python -m engine.shape_probe FOLDER PARENT` reports how a model can be split among ranks."""
QUANTIZE_MODULE: Final = "engine.quantize"
"""`python -m engine.quantize SOURCE INTO BITS GROUP_SIZE MEMORY_BYTES PARENT` writes a quantized model."""
DEVICE_CHECK_MODULE: Final = "engine.device_check"
"""`python -m engine.device_check` computes once on the GPU."""

MAX_SECRET_BYTES: Final = 512
"""The largest secret of a group, in bytes. The agent writes it to a pipe, the rank's stdin, before the rank exists:
other users of a machine can read command lines, and environments stay readable for as long as a process lives. 512 bytes
fit every pipe (_POSIX_PIPE_BUF), so the agent never waits, and its death at any moment leaves the rank with all or none."""

Value: TypeAlias = (
    str | int | float | Path | tuple[str, ...] | tuple[int, ...] | Sampling | Vision | None
)

_HOST: Final = "127.0.0.1"
_MAX_PORT: Final = 65535
# Where guesses come from.
_GUESSES: Final = ("draft_model", "ngram_tokens", "mtp_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """One flag as argparse takes it."""

    name: str
    parse: Callable[[str], Any]
    help: str
    choices: tuple[Any, ...] | None = None
    is_repeated: bool = False


def _flag(name: str, parse: Callable[[str], Any], help_: str, **rest: Any) -> Mapping[str, Any]:
    return {"flag": _Flag(name=name, parse=parse, help=help_, **rest)}


def _at_least(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
        if maximum is not None and value > maximum:
            raise argparse.ArgumentTypeError(f"{value} is more than {maximum}")
        return value

    return integer


# A guess is right only if all before it were: beyond this guesses cost more than they save.
_guess_count: Final = _at_least(1, 16)


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 up")
    return value


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _socket(text: str) -> Path:
    try:
        return Path(EngineAddress.at_socket(Path(text)).socket)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


_M = TypeVar("_M", bound=BaseModel)


def _json(model: type[_M], text: str) -> _M:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise argparse.ArgumentTypeError(f"{where}: {first['msg']}") from error


def _lora_module(text: str) -> str:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER")
    return text


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers with commas between")
    return tuple(map(int, parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Flags of one engine process."""

    model_dir: Path = field(metadata=_flag("--model-dir", Path, "folder of the model"))
    replica: str = field(metadata=_flag("--replica", str, "name of the replica"))
    replica_uid: str = field(metadata=_flag("--replica-uid", str, "uid of the replica"))
    node: str = field(metadata=_flag("--node", str, "name of this node"))
    served_names: tuple[str, ...] = field(
        metadata=_flag(
            "--served-name", str, "name that requests may ask for; repeatable", is_repeated=True
        )
    )
    context_length: int = field(
        metadata=_flag("--context-length", _at_least(2), "tokens of a request, prompt and answer")
    )
    concurrency: int = field(
        metadata=_flag("--concurrency", _at_least(1), "requests that run at the same time")
    )
    socket: Path | None = field(
        default=None,
        metadata=_flag("--socket", _socket, "Unix socket of the API, in a folder of mode 0700"),
    )
    port: int | None = field(
        default=None,
        metadata=_flag("--port", _at_least(1, _MAX_PORT), "TCP port of the API, without --socket"),
    )
    host: str | None = field(
        default=None,
        metadata=_flag("--host", str, f"address to listen on with --port; default: {_HOST}"),
    )
    queue_limit: int | None = field(
        default=None,
        metadata=_flag(
            "--queue-limit", _at_least(0), "requests that may wait; default: 4 x concurrency"
        ),
    )
    sampling: Sampling | None = field(
        default=None,
        metadata=_flag(
            "--sampling",
            partial(_json, Sampling),
            "values for requests that leave them out, as JSON of spec.sampling",
        ),
    )
    vision: Vision | None = field(
        default=None,
        metadata=_flag(
            "--vision",
            partial(_json, Vision),
            "limits of images in requests, as JSON of spec.model.vision; default: text only",
        ),
    )
    unknown_parameters: UnknownParameters | None = field(
        default=None,
        metadata=_flag(
            "--unknown-parameters",
            str,
            "what to do with parameters that only other servers have; default: Warn",
            choices=get_args(UnknownParameters),
        ),
    )
    performance: Performance | None = field(
        default=None,
        metadata=_flag(
            "--performance",
            str,
            "when answers have the member performance; default: OnRequest",
            choices=get_args(Performance),
        ),
    )
    drain_timeout_s: float | None = field(
        default=None,
        metadata=_flag(
            "--drain-timeout", _seconds, "seconds for running requests after a stop; default: 30"
        ),
    )
    max_body_bytes: int | None = field(
        default=None,
        metadata=_flag(
            "--max-body-bytes", _at_least(1), "largest request body in bytes; default: 8 MiB"
        ),
    )
    input_limit_s: float | None = field(
        default=None,
        metadata=_flag(
            "--input-limit",
            _positive_seconds,
            "CPU seconds to tokenize a request, or to compile its schema; default: 2",
        ),
    )
    blas_cache: Path | None = field(
        default=None,
        metadata=_flag(
            "--blas-cache", Path, "folder of compiled BLAS shims (Linux); default: the user's cache"
        ),
    )
    kv_tokens: int | None = field(
        default=None,
        metadata=_flag("--kv-tokens", _at_least(1), "tokens of all requests together"),
    )
    kv_bits: int | None = field(
        default=None,
        metadata=_flag("--kv-bits", int, "bits of a number in the KV cache", choices=(4, 8)),
    )
    kv_window: int | None = field(
        default=None,
        metadata=_flag("--kv-window", _at_least(16), "tokens kept in the KV cache"),
    )
    kv_keep: int | None = field(
        default=None,
        metadata=_flag("--kv-keep", _at_least(1), "first tokens that --kv-window keeps"),
    )
    prefix_cache_bytes: int | None = field(
        default=None,
        metadata=_flag("--prefix-cache-bytes", _at_least(0), "memory of the prefix cache"),
    )
    prefix_disk_bytes: int | None = field(
        default=None,
        metadata=_flag(
            "--prefix-disk-bytes",
            _at_least(0),
            "disk of the prefix cache, which outlives the engine; default: 0, none",
        ),
    )
    prefix_disk_dir: Path | None = field(
        default=None,
        metadata=_flag(
            "--prefix-disk-dir",
            Path,
            "folder of the prefix cache on disk; default: in the user's cache folder",
        ),
    )
    memory_limit_bytes: int | None = field(
        default=None,
        metadata=_flag(
            "--memory-limit-bytes", _at_least(1), "memory of this process; default: no limit"
        ),
    )
    identity_dir: Path | None = field(
        default=None,
        metadata=_flag(
            "--identity-dir",
            Path,
            "folder of the node's identity, to serve TLS; default: plain HTTP",
        ),
    )
    adapter: Path | None = field(
        default=None, metadata=_flag("--adapter", Path, "folder of a LoRA adapter")
    )
    lora_modules: tuple[str, ...] | None = field(
        default=None,
        metadata=_flag(
            "--lora-module",
            _lora_module,
            "NAME=FOLDER: a LoRA adapter that requests choose as the model NAME; repeatable",
            is_repeated=True,
        ),
    )
    draft_model: Path | None = field(
        default=None,
        metadata=_flag("--draft-model", Path, "folder of a draft model for speculative decoding"),
    )
    draft_tokens: int | None = field(
        default=None,
        metadata=_flag("--draft-tokens", _guess_count, "tokens of a draft; default: 3"),
    )
    ngram_tokens: int | None = field(
        default=None, metadata=_flag("--ngram-tokens", _guess_count, "guesses from earlier text")
    )
    mtp_tokens: int | None = field(
        default=None,
        metadata=_flag("--mtp-tokens", _guess_count, "guesses of the model's own head"),
    )
    rank: int | None = field(
        default=None, metadata=_flag("--rank", _at_least(0), "rank of this process in its group")
    )
    world_size: int | None = field(
        default=None,
        metadata=_flag("--world-size", _at_least(2), "processes that share the model"),
    )
    coordinator: str | None = field(
        default=None,
        metadata=_flag("--coordinator", str, "HOST:PORT on which rank 0 listens to the others"),
    )
    epoch: int | None = field(
        default=None,
        metadata=_flag("--epoch", _at_least(1), "number of this start of the group; default: 1"),
    )
    backend: Backend | None = field(
        default=None,
        metadata=_flag(
            "--backend",
            str,
            "MLX's communication backend; default: ring",
            choices=get_args(Backend),
        ),
    )
    parallelism: Parallelism | None = field(
        default=None,
        metadata=_flag(
            "--parallelism",
            str,
            "split of the model; default: Tensor",
            choices=get_args(Parallelism),
        ),
    )
    layers: tuple[int, ...] | None = field(
        default=None,
        metadata=_flag(
            "--layers", _layers, "n0,n1,...: layers of each rank, in rank order; default: evenly"
        ),
    )
    join_timeout_s: float | None = field(
        default=None,
        metadata=_flag("--join-timeout", _seconds, "seconds to wait for other ranks; default: 120"),
    )

    @property
    def is_grouped(self) -> bool:
        """Return whether the process shares its model with other ranks."""
        return self.rank is not None

    def address(self) -> EngineAddress:
        """Return where the engine listens."""
        return _address(self.socket, self.host, self.port)

    def coordinator_address(self) -> tuple[str, int]:
        """Return host and port of `coordinator`, an IPv6 address without its brackets.

        Raises:
            ValueError: it is not HOST:PORT.

        """
        host, _, port = (self.coordinator or "").rpartition(":")
        if not (host and port.isascii() and port.isdecimal() and 0 < int(port) <= _MAX_PORT):
            raise ValueError(f"--coordinator must be HOST:PORT, not {self.coordinator!r}")
        return host.strip("[]"), int(port)

    def to_argv(self) -> list[str]:
        """Return the flags as words of a command line, without the interpreter and the module."""
        return to_argv(**{one.name: getattr(self, one.name) for one in dataclasses.fields(self)})

    @classmethod
    def from_argv(cls, arguments: Sequence[str] | None) -> Self:
        """Return the flags in `arguments`, or in `sys.argv` for None.

        Exits the process with code 2 and a line on stderr if a flag is missing, unknown or wrong, or if two
        flags exclude each other.
        """
        parser = _parser()
        found = vars(parser.parse_args(arguments))
        found["served_names"] = tuple(dict.fromkeys(found["served_names"]))
        found["lora_modules"] = tuple(found["lora_modules"] or ()) or None
        flags = cls(**found)
        error = flags.conflict()
        if error:
            parser.error(error)
        return flags

    def conflict(self) -> str:
        """Return why the flags exclude each other, "" if they do not; schemas/deployment.py has the same rules."""
        return self._address_conflict() or self._model_conflict() or self._group_conflict()

    def _address_conflict(self) -> str:
        if (self.socket is None) == (self.port is None):
            return "exactly one of --socket and --port is needed: an engine listens in one place"
        if self.socket is not None and self.host is not None:
            return "--host needs --port: a socket has no host"
        if self.socket is not None and self.identity_dir is not None:
            return "--identity-dir needs --port: a socket is private to its user without TLS"
        return ""

    def _model_conflict(self) -> str:
        if self.kv_window is not None:
            if self.kv_bits is not None:
                return "--kv-window cannot be combined with --kv-bits: a rotating cache is never quantized"
            if self.kv_window >= self.context_length:
                return "--kv-window must be less than --context-length"
        if self.kv_keep is not None and 2 * self.kv_keep > (self.kv_window or 0):
            return "--kv-keep must be at most half of --kv-window"
        if self.kv_tokens is not None and self.kv_tokens < self.context_length:
            return "--kv-tokens must be at least --context-length: one request may need all of it"
        return self._vision_conflict() or self._guess_conflict() or self._adapter_conflict()

    def _vision_conflict(self) -> str:
        others = ("adapter", "lora_modules", *_GUESSES, "kv_bits", "kv_window")
        found = next((_FLAGS[name].name for name in others if getattr(self, name) is not None), "")
        if self.vision is not None and found:
            return f"--vision cannot be combined with {found}: it is for models of mlx-lm"
        return ""

    def _guess_conflict(self) -> str:
        found = [_FLAGS[name].name for name in _GUESSES if getattr(self, name) is not None]
        if self.kv_window is not None and found:
            return f"--kv-window cannot be combined with {found[0]}: a guess cannot be taken back"
        if len(found) > 1:
            return f"{found[0]} cannot be combined with {found[1]}: choose one source of guesses"
        if self.draft_tokens is not None and self.draft_model is None:
            return "--draft-tokens needs --draft-model"
        return ""

    def _adapter_conflict(self) -> str:
        names = [one.partition("=")[0] for one in self.lora_modules or ()]
        if names and self.adapter is not None:
            return "--lora-module cannot be combined with --adapter, which all requests use"
        twice = sorted({one for one in names if names.count(one) > 1})
        if twice:
            return f"--lora-module names {twice[0]} more than once"
        taken = sorted(set(names) & set(self.served_names))
        if taken:
            return f"--lora-module and --served-name both have {taken[0]}"
        return ""

    def adapters(self) -> dict[str, Path]:
        """Return the folders of `lora_modules` by name."""
        pairs = (one.partition("=") for one in self.lora_modules or ())
        return {name: Path(folder) for name, _, folder in pairs}

    def _group_conflict(self) -> str:
        needed = (self.rank, self.world_size, self.coordinator)
        optional = (self.epoch, self.backend, self.parallelism, self.layers)
        if all(value is None for value in needed + optional):
            return ""
        if self.rank is None or self.world_size is None or self.coordinator is None:
            return "a group needs --rank, --world-size and --coordinator"
        try:
            self.coordinator_address()
        except ValueError as error:
            return str(error)
        if self.rank >= self.world_size:
            return f"--rank must be less than --world-size: {self.rank} of {self.world_size}"
        return self._single_only_conflict() or self._layers_conflict(self.world_size)

    def _single_only_conflict(self) -> str:
        """Return which flag only an engine with all of its model takes."""
        if self.vision is not None:
            return "--vision cannot be combined with --world-size: mlx-vlm's models cannot be split"
        found = next((name for name in _GUESSES if getattr(self, name) is not None), None)
        if found is not None:
            return f"{_FLAGS[found].name} cannot be combined with --world-size: ranks would guess differently"
        if self.lora_modules:
            return "--lora-module cannot be combined with --world-size: an adapter's layers cannot be split"
        if self.adapter is not None:
            return "--adapter cannot be combined with --world-size: mlx-lm cannot split an adapter's layers"
        return ""

    def _layers_conflict(self, world_size: int) -> str:
        if self.layers is None:
            return ""
        if self.parallelism != "Pipeline":
            return "--layers needs --parallelism Pipeline: Tensor splits every layer"
        if len(self.layers) != world_size or 0 in self.layers:
            found = ",".join(map(str, self.layers))
            return (
                f"--layers must be {world_size} numbers from 1 up, one for each rank, not {found}"
            )
        return ""


_FLAGS: Final[Mapping[str, _Flag]] = {
    one.name: one.metadata["flag"] for one in dataclasses.fields(EngineFlags)
}
_REQUIRED: Final = frozenset(
    one.name for one in dataclasses.fields(EngineFlags) if one.default is dataclasses.MISSING
)


def to_argv(**values: Value) -> list[str]:
    """Return some of the flags, named as the fields of `EngineFlags`, as words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = _FLAGS[name]
        if value is None:
            continue
        for one in value if flag.is_repeated and isinstance(value, tuple) else (value,):
            words += (flag.name, _written(one))
    return words


def _written(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Sampling | Vision):
        return value.model_dump_json(by_alias=True, exclude_none=True)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine", description="Serve one model.")
    for name, flag in _FLAGS.items():
        _add(parser, name, flag, is_required=name in _REQUIRED)
    return parser


def _add(
    parser: argparse.ArgumentParser, name: str, flag: _Flag, *, is_required: bool
) -> argparse.Action:
    return parser.add_argument(
        flag.name,
        dest=name,
        type=flag.parse,
        help=flag.help,
        choices=flag.choices,
        required=is_required,
        action="append" if flag.is_repeated else "store",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """The part of a running engine's command line that its agent needs to adopt it."""

    replica: str = ""
    replica_uid: str = ""
    node: str = ""
    served_names: tuple[str, ...] = ()
    socket: Path | None = None
    host: str | None = None
    port: int = 0
    epoch: int = 0
    """The start of its group; 0 where one process has all of the model."""
    memory_limit_bytes: int = 0
    identity_dir: Path | None = None
    """The folder of the identity with which it serves TLS; None where it serves plain HTTP."""

    @property
    def address(self) -> EngineAddress:
        """Return where the engine listens."""
        found = _address(self.socket, self.host, self.port)
        return found if self.identity_dir is None else found._replace(node=self.node)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> Self | None:
        """Return the identity in a whole command line; None if it is not an engine's.

        Flags that are missing or unknown are accepted: another version of the agent may have started it.
        """
        if not _runs(argv, MODULE):
            return None
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
        names = [one.name for one in dataclasses.fields(cls)]
        for name in names:
            _add(parser, name, _FLAGS[name], is_required=False)
        try:
            found = vars(parser.parse_known_args(list(argv))[0])
        except argparse.ArgumentError:
            return None
        found["served_names"] = tuple(found["served_names"] or ())
        return cls(**{name: value for name, value in found.items() if value is not None})


def _address(path: Path | None, host: str | None, port: int | None) -> EngineAddress:
    if path is not None:
        return EngineAddress.at_socket(path)
    return EngineAddress(host or _HOST, port or 0)


def is_golden(argv: Sequence[str]) -> bool:
    """Return whether a command line is that of a process which answers the golden question."""
    return _runs(argv, GOLDEN_MODULE)


def _runs(argv: Sequence[str], module: str) -> bool:
    """Return whether Python runs the module."""
    return ("-m", module) in pairwise(argv)
