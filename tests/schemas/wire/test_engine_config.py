"""The engine's configuration: what the agent writes is what the engine reads, and what is refused in words."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.kv_cache import KvCache
from schemas.sampling import Sampling
from schemas.vision import Vision
from schemas.wire import engine_config
from schemas.wire.engine_config import EngineConfig, EngineIdentity, GroupConfig

LEAST = EngineConfig(model_dir=Path("/m/tiny"))
GROUP = GroupConfig(rank=1, world_size=2, host="10.0.0.1", port=20001, secret="s3cret", epoch=3)
RANK = LEAST.model_copy(update={"group": GROUP, "memory_limit_bytes": 7, "replica_uid": "u"})
PLACE = {"rank": 1, "worldSize": 2, "host": "h", "port": 1}


@pytest.mark.parametrize(
    "config",
    [
        LEAST,
        RANK,
        EngineConfig(
            model_dir=Path("/m"),
            node="mac-1",
            url="https://[::1]:4100",
            identity_dir=Path("/i"),
            queue_depth=0,
            kv_cache=KvCache(bits=8, prefix_bytes="0"),
            sampling=Sampling(temperature=0),
            adapters={"tiny:law": Path("/m/a=b")},
            drain_timeout_s=0,
        ),
        EngineConfig(model_dir=Path("/m"), url="unix:/s/4100.sock", vision=Vision(max_images=1)),
    ],
)
def test_what_is_written_is_read_back(config: EngineConfig) -> None:
    assert EngineConfig.model_validate_json(config.to_json()) == config
    argv = ["python", "-m", engine_config.MODULE, *config.identity.to_argv()]
    identity = EngineIdentity.from_argv(argv)
    assert identity == config.identity
    assert identity.address == config.address
    assert "s3cret" not in f"{argv} {config!r}"


def test_a_command_line_holds_the_identity_alone() -> None:
    assert RANK.identity.to_argv() == [
        *("replica=engine", "uid=u", "node=", "model=model", "url=http://127.0.0.1:4100"),
        *("epoch=3", "rank=1", "memory=7"),
    ]


@pytest.mark.parametrize("argv", [
    [], ["vim", "engine"],
    ["python", "-m", "engine.golden"],
    ["python", "-m", "engine", "--config", "engine.json"],
    ["python", "-m", "engine", *RANK.identity.to_argv()[1:]],
    ["python", "-m", "engine", *RANK.identity.to_argv(), "epoch=x"],
    ["python", "-m", "engine", *RANK.identity.to_argv(), "url=none"],
])  # fmt: skip
def test_other_processes_are_no_engines(argv: list[str]) -> None:
    assert EngineIdentity.from_argv(argv) is None
    assert engine_config.is_golden(argv) == ("engine.golden" in argv)


@pytest.mark.parametrize(("fields", "error"), [
    ({"kvBits": 4}, "kvBits: Extra inputs are not permitted"),
    ({"kvCache": {"bits": 5}}, "kvCache.bits: Input should be 4 or 8"),
    ({"kvCache": {"tokens": 63}}, "kvCache.tokens must be at least contextLength"),
    ({"kvCache": {"window": 64}}, "kvCache.window must be less than contextLength"),
    ({"kvCache": {"window": 32, "keep": 17}}, "must be at most half of window"),
    ({"kvCache": {"window": 32, "bits": 8}}, "has bits and window"),
    ({"draftModel": "d", "ngramTokens": 4}, "draftModel cannot be combined with ngramTokens: choose one source of guesses"),
    ({"ngramTokens": 17}, "ngramTokens: Input should be less than or equal to 16"),
    ({"adapter": "d", "adapters": {"a": "d"}}, "adapter cannot be combined with adapters"),
    ({"adapters": {"tiny": "d"}}, "adapters and servedNames both have tiny"),
    ({"vision": {}, "kvCache": {"bits": 8}}, "vision cannot be combined with kvCache.bits"),
    ({"vision": {"maxImages": 0}}, "vision.maxImages: Input should be greater"),
    ({"group": PLACE, "ngramTokens": 2}, "group cannot be combined with ngramTokens"),
    ({"group": PLACE, "vision": {}}, "group cannot be combined with vision"),
    ({"group": PLACE, "adapter": "d"}, "group cannot be combined with adapter"),
    ({"group": PLACE | {"rank": 2}}, "rank must be less than worldSize: 2 of 2"),
    ({"group": PLACE | {"layers": [1, 2]}}, "layers needs parallelism Pipeline"),
    ({"group": PLACE | {"layers": [3], "parallelism": "Pipeline"}}, "layers must be 2 numbers"),
    ({"group": PLACE | {"backend": "mpi"}}, "group.backend: Input should be"),
    ({"url": "https://127.0.0.1:1"}, "'https://127.0.0.1:1' is not https://HOST:PORT"),
    ({"url": "https://127.0.0.1:1", "node": "a"}, "identityDir and an https url with a node"),
    ({"identityDir": "/i"}, "identityDir and an https url with a node"),
    ({"url": "unix:s"}, "is not https://HOST:PORT, http://HOST:PORT or unix:/PATH"),
    ({"concurrency": 0}, "concurrency: Input should be greater"),
    ({"drainTimeoutS": float("inf")}, "drainTimeoutS: Input should be a finite number"),
])  # fmt: skip
def test_what_an_engine_cannot_do_is_refused(fields: dict[str, Any], error: str) -> None:
    tree = {"modelDir": "/m", "servedNames": ["tiny"], "contextLength": 64, **fields}
    with pytest.raises(ValidationError) as refused:
        EngineConfig.model_validate(tree, strict=False)
    first = refused.value.errors()[0]
    assert error in f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
