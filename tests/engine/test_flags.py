"""The engine's configuration: defaults of its flags, and the secret of a group.

tests/schemas/wire/test_engine_flags.py tests the flags themselves.
"""

import dataclasses
from pathlib import Path

import pytest

from engine.flags import parse
from schemas.vision import Vision
from schemas.wire.engine_flags import EngineFlags

LEAST = EngineFlags(
    model_dir=Path("/m/tiny"),
    replica="tiny-0",
    replica_uid="u",
    node="a",
    served_names=("tiny",),
    port=4100,
    context_length=64,
    concurrency=2,
)
GROUP = dataclasses.replace(LEAST, rank=1, world_size=2, coordinator="10.0.0.1:20001")


def test_missing_flags_have_defaults() -> None:
    config = parse(LEAST.to_argv())
    assert (config.queue_limit, config.address.url, config.drain_timeout_s) == (
        8,
        "http://127.0.0.1:4100",
        30.0,
    )
    assert (config.draft_tokens, config.max_body_bytes) == (3, 8 << 20)
    assert config.blas_cache.name == "blas"
    assert config.group is None
    for name in (
        "kv_tokens",
        "kv_bits",
        "kv_window",
        "prefix_cache_bytes",
        "memory_limit_bytes",
        "adapter",
    ):
        assert getattr(config, name) is None


def test_names_come_once_in_their_order() -> None:
    names = ["--served-name", "fast", "--served-name", "tiny"]
    assert parse([*LEAST.to_argv(), *names]).served_names == ("tiny", "fast")


def test_a_rank_of_a_group() -> None:
    plain = parse(GROUP.to_argv(), read_secret=lambda: "s").group
    assert plain is not None
    assert (plain.rank, plain.world_size) == (1, 2)
    assert (plain.host, plain.port, plain.secret, plain.epoch) == ("10.0.0.1", 20001, "s", 1)
    assert (plain.backend, plain.parallelism, plain.layers) == ("ring", "Tensor", ())
    assert plain.timeout_s == 120.0
    pipeline = dataclasses.replace(
        GROUP, epoch=3, backend="jaccl-ring", parallelism="Pipeline", layers=(3, 1)
    )
    found = parse(pipeline.to_argv(), read_secret=lambda: "s").group
    assert found is not None
    assert (found.epoch, found.backend) == (3, "jaccl-ring")
    assert (found.parallelism, found.layers) == ("Pipeline", (3, 1))


def test_every_flag_reaches_the_configuration() -> None:
    flags = dataclasses.replace(
        LEAST,
        host="10.0.0.2",
        queue_limit=0,
        drain_timeout_s=0.0,
        max_body_bytes=7,
        blas_cache=Path("/c"),
        kv_bits=4,
        prefix_cache_bytes=0,
        prefix_disk_bytes=9,
        prefix_disk_dir=Path("/d"),
        memory_limit_bytes=1000,
        adapter=Path("/m/law"),
        draft_model=Path("/m/small"),
        draft_tokens=5,
    )
    config = parse(flags.to_argv())
    assert (config.address.url, config.queue_limit, config.drain_timeout_s) == (
        "http://10.0.0.2:4100",
        0,
        0.0,
    )
    assert (config.max_body_bytes, config.blas_cache) == (7, Path("/c"))
    assert (config.kv_bits, config.prefix_cache_bytes) == (4, 0)
    assert (config.prefix_disk_bytes, config.prefix_disk_dir) == (9, Path("/d"))
    assert (config.memory_limit_bytes, config.adapter) == (1000, Path("/m/law"))
    assert (config.draft_model, config.draft_tokens) == (Path("/m/small"), 5)
    windowed = parse([*LEAST.to_argv(), "--kv-window", "32", "--kv-keep", "4"])
    assert (windowed.kv_window, windowed.kv_keep) == (32, 4)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(
            GROUP.to_argv(), "a rank needs the secret of its group on stdin", id="no-secret"
        ),
        pytest.param(
            [*LEAST.to_argv(), "--kv-bits", "5"], "argument --kv-bits: invalid choice: 5", id="flag"
        ),
    ],
)
def test_wrong_flags_end_the_process(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]  # the line that the agent shows
    assert last.startswith(f"engine: error: {error}")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--kv-bits", "8"], "--vision cannot be combined with --kv-bits"),
        (["--ngram-tokens", "3"], "--vision cannot be combined with --ngram-tokens"),
    ],
)
def test_vision_is_for_whole_models_of_their_own(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*LEAST.to_argv(), "--vision", "{}", *more])
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse([*LEAST.to_argv(), "--vision", '{"maxImages": 0}'])
    assert "maxImages" in capsys.readouterr().err
    config = parse([*LEAST.to_argv(), "--vision", '{"maxImages": 2}'])
    assert config.vision == Vision(max_images=2)
    assert parse(dataclasses.replace(LEAST, vision=config.vision).to_argv()) == config
