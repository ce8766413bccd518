"""The engine's command line: what is taken, what is filled in, and what is refused in words."""

from pathlib import Path

import pytest

from engine.flags import parse

GROUP = "--rank 1 --world-size 2 --coordinator 10.0.0.1:20001"
PIPELINE = "--parallelism Pipeline"
LEAST = [
    *("--model-dir", "/m/tiny", "--replica", "tiny-0", "--replica-uid", "u", "--node", "a"),
    *("--served-name", "tiny", "--port", "4100", "--context-length", "64", "--concurrency", "2"),
]


def test_what_is_left_out_has_a_default() -> None:
    config = parse(LEAST)
    assert (config.queue_limit, config.host, config.drain_timeout_s) == (8, "127.0.0.1", 30.0)
    assert config.draft_tokens == 3
    for name in ("kv_bits", "kv_window", "prefix_cache_bytes", "memory_limit_bytes", "adapter"):
        assert getattr(config, name) is None


def test_names_come_once_in_their_order() -> None:
    names = ["--served-name", "fast", "--served-name", "tiny"]
    assert parse([*LEAST, *names]).served_names == ("tiny", "fast")


def test_a_place_in_a_group_can_be_told() -> None:
    plain = parse([*LEAST, *GROUP.split()], secret="s").group
    assert plain is not None
    assert (plain.host, plain.port, plain.secret, plain.epoch) == ("10.0.0.1", 20001, "s", 1)
    assert (plain.backend, plain.parallelism, plain.layers) == ("ring", "Tensor", ())
    more = ["--epoch", "3", "--backend", "jaccl-ring", *PIPELINE.split(), "--layers", "3,1"]
    found = parse([*LEAST, *GROUP.split(), *more], secret="s").group
    assert found is not None
    assert (found.epoch, found.backend) == (3, "jaccl-ring")
    assert (found.parallelism, found.layers) == ("Pipeline", (3, 1))


def test_everything_can_be_told() -> None:
    config = parse(
        [
            *LEAST,
            *("--queue-limit", "0", "--kv-bits", "4", "--prefix-cache-bytes", "0"),
            *("--memory-limit-bytes", "1000", "--adapter", "/m/law"),
            *("--draft-model", "/m/small", "--draft-tokens", "5"),
        ]
    )
    assert (config.queue_limit, config.kv_bits, config.prefix_cache_bytes) == (0, 4, 0)
    assert (config.memory_limit_bytes, config.adapter) == (1000, Path("/m/law"))
    assert (config.draft_model, config.draft_tokens) == (Path("/m/small"), 5)
    assert parse([*LEAST, "--kv-window", "32"]).kv_window == 32


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--kv-bits 5", "argument --kv-bits: invalid choice: 5"),
        ("--kv-window 15", "argument --kv-window: 15 is less than 16"),
        ("--kv-window 64", "--kv-window must be less than --context-length"),
        ("--kv-window 32 --kv-bits 8", "--kv-window does not go with --kv-bits"),
        ("--kv-window 32 --draft-model d", "--kv-window does not go with --draft-model"),
        ("--draft-tokens 3", "--draft-tokens needs --draft-model"),
        ("--draft-model d --draft-tokens 0", "argument --draft-tokens: 0 is less than 1"),
        ("--draft-model d --draft-tokens 17", "argument --draft-tokens: 17 is more than 16"),
        ("--prefix-cache-bytes -1", "argument --prefix-cache-bytes: -1 is less than 0"),
        ("--memory-limit-bytes 0", "argument --memory-limit-bytes: 0 is less than 1"),
        ("--queue-limit many", "argument --queue-limit: invalid integer value: 'many'"),
        ("--concurrency 0", "argument --concurrency: 0 is less than 1"),
        ("--port 99999", "argument --port: 99999 is more than 65535"),
        ("--drain-timeout nan", "argument --drain-timeout: nan is no number of seconds from 0 up"),
        ("--world-size 2", "a group needs --rank, --world-size, --coordinator"),
        ("--epoch 2", "a group needs --rank, --world-size, --coordinator"),
        (f"{GROUP} --coordinator 10.0.0.1", "--coordinator must be HOST:PORT"),
        (f"{GROUP} --rank 2", "--rank 2 is none of 2 ranks"),
        (f"{GROUP} --draft-model d", "--draft-model does not go with --world-size"),
        (f"{GROUP} --adapter d", "--adapter does not go with --world-size"),
        (f"{GROUP} --layers 1,2", "--layers goes with --parallelism Pipeline only"),
        (f"{GROUP} {PIPELINE} --layers 3", "--layers must be 2 numbers from 1 up"),
        (f"{GROUP} {PIPELINE} --layers 3,0", "--layers must be 2 numbers from 1 up"),
        (f"{GROUP} --backend mpi", "argument --backend: invalid choice: 'mpi'"),
        ("--speed 11", "unrecognized arguments: --speed 11"),
    ],
)
def test_refusals_end_the_process_with_words(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*LEAST, *words.split()], secret="s")
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]  # the line that the agent shows
    assert last.startswith(f"engine: error: {complaint}")
