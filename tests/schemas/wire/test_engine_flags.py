"""The engine's command line: what the agent writes is what the engine reads, and what is refused in words."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.wire import engine_flags
from schemas.wire.engine_flags import EngineFlags, EngineIdentity
from tests.support.sampling import samples

LEAST = EngineFlags(
    model_dir=Path("/m/tiny"),
    replica="tiny-0",
    replica_uid="u",
    node="a",
    served_names=("tiny", "fast"),
    port=4100,
    context_length=64,
    concurrency=2,
)
MODULES = dataclasses.replace(LEAST, lora_modules=("tiny:law=/m/law", "tiny:a=/m/a=b"))
GROUP = dataclasses.replace(
    LEAST,
    host="::1",
    rank=1,
    world_size=2,
    coordinator="10.0.0.1:20001",
    epoch=3,
    backend="jaccl-ring",
    parallelism="Pipeline",
    layers=(3, 1),
    join_timeout_s=720.0,
)
SOCKET = dataclasses.replace(LEAST, port=None, socket=Path("/s/mac-1/4100.sock"))
WHOLE = dataclasses.replace(
    LEAST,
    queue_limit=0,
    drain_timeout_s=2.5,
    max_body_bytes=1,
    blas_cache=Path("/c"),
    kv_tokens=64,
    kv_bits=8,
    prefix_cache_bytes=0,
    memory_limit_bytes=1,
    adapter=Path("/m/law"),
    draft_model=Path("/m/small"),
    draft_tokens=16,
)


def test_a_field_of_none_is_not_written() -> None:
    assert LEAST.to_argv() == [
        *("--model-dir", "/m/tiny", "--replica", "tiny-0", "--replica-uid", "u", "--node", "a"),
        *("--served-name", "tiny", "--served-name", "fast"),
        *("--context-length", "64", "--concurrency", "2", "--port", "4100"),
    ]


@pytest.mark.parametrize(
    "flags", [LEAST, MODULES, SOCKET, GROUP, WHOLE, dataclasses.replace(LEAST, kv_window=63)]
)
def test_what_is_written_is_read_back(flags: EngineFlags) -> None:
    assert EngineFlags.from_argv(flags.to_argv()) == flags


@given(
    queue_limit=st.none() | st.integers(0, 10**9),
    bits=st.none() | st.sampled_from([4, 8]),
    cache=st.none() | st.integers(0, 2**60),
    drain_s=st.none() | st.integers(0, 10**5).map(float),
    name=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1),
)
@settings(max_examples=samples(30))
def test_any_values_are_read_back(
    queue_limit: int | None, bits: int | None, cache: int | None, drain_s: float | None, name: str
) -> None:
    flags = dataclasses.replace(
        LEAST,
        queue_limit=queue_limit,
        kv_bits=bits,
        prefix_cache_bytes=cache,
        drain_timeout_s=drain_s,
        served_names=(name,),
    )
    assert EngineFlags.from_argv(flags.to_argv()) == flags


def test_every_field_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        EngineFlags.from_argv(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(EngineFlags):
        assert field.metadata["flag"].name in shown


def test_names_come_once_in_their_order() -> None:
    argv = [*LEAST.to_argv(), "--served-name", "tiny", "--served-name", "large"]
    assert EngineFlags.from_argv(argv).served_names == ("tiny", "fast", "large")


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("::1:9", ("::1", 9)),
    ],
)
def test_a_coordinator_is_host_and_port(coordinator: str, address: tuple[str, int]) -> None:
    assert dataclasses.replace(GROUP, coordinator=coordinator).coordinator_address() == address


ONE = "--rank 1 --world-size 2 --coordinator 10.0.0.1:20001"
PIPELINE = "--parallelism Pipeline"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--kv-bits 5", "argument --kv-bits: invalid choice: 5"),
        ("--kv-tokens 63", "--kv-tokens must be at least --context-length"),
        ("--kv-window 15", "argument --kv-window: 15 is less than 16"),
        ("--kv-window 64", "--kv-window must be less than --context-length"),
        ("--kv-keep 4", "--kv-keep must be at most half of --kv-window"),
        ("--kv-window 32 --kv-keep 17", "--kv-keep must be at most half of --kv-window"),
        ("--kv-window 32 --kv-bits 8", "--kv-window cannot be combined with --kv-bits"),
        ("--kv-window 32 --draft-model d", "--kv-window cannot be combined with --draft-model"),
        ("--kv-window 32 --ngram-tokens 4", "--kv-window cannot be combined with --ngram-tokens"),
        (
            "--draft-model d --ngram-tokens 4",
            "--draft-model cannot be combined with --ngram-tokens",
        ),
        ("--kv-window 32 --mtp-tokens 4", "--kv-window cannot be combined with --mtp-tokens"),
        (
            "--mtp-tokens 2 --ngram-tokens 4",
            "--ngram-tokens cannot be combined with --mtp-tokens",
        ),
        ("--ngram-tokens 17", "argument --ngram-tokens: 17 is more than 16"),
        ("--draft-tokens 3", "--draft-tokens needs --draft-model"),
        ("--draft-model d --draft-tokens 0", "argument --draft-tokens: 0 is less than 1"),
        ("--draft-model d --draft-tokens 17", "argument --draft-tokens: 17 is more than 16"),
        ("--prefix-cache-bytes -1", "argument --prefix-cache-bytes: -1 is less than 0"),
        ("--memory-limit-bytes 0", "argument --memory-limit-bytes: 0 is less than 1"),
        ("--queue-limit many", "argument --queue-limit: invalid integer value: 'many'"),
        ("--concurrency 0", "argument --concurrency: 0 is less than 1"),
        ("--port 99999", "argument --port: 99999 is more than 65535"),
        ("--drain-timeout nan", "argument --drain-timeout: nan is not a number of seconds from 0"),
        ("--world-size 2", "a group needs --rank, --world-size and --coordinator"),
        ("--epoch 2", "a group needs --rank, --world-size and --coordinator"),
        (f"{ONE} --coordinator 10.0.0.1", "--coordinator must be HOST:PORT, not '10.0.0.1'"),
        (f"{ONE} --coordinator a:65536", "--coordinator must be HOST:PORT, not 'a:65536'"),
        (f"{ONE} --rank 2", "--rank must be less than --world-size: 2 of 2"),
        (f"{ONE} --ngram-tokens 2", "--ngram-tokens cannot be combined with --world-size"),
        (f"{ONE} --mtp-tokens 2", "--mtp-tokens cannot be combined with --world-size"),
        (f"{ONE} --draft-model d", "--draft-model cannot be combined with --world-size"),
        (f"{ONE} --adapter d", "--adapter cannot be combined with --world-size"),
        (f"{ONE} --lora-module a=d", "--lora-module cannot be combined with --world-size"),
        ("--lora-module a", "argument --lora-module: 'a' is not NAME=FOLDER"),
        ("--lora-module =d", "argument --lora-module: '=d' is not NAME=FOLDER"),
        ("--lora-module a=d --adapter d", "--lora-module cannot be combined with --adapter"),
        ("--lora-module a=d --lora-module a=e", "--lora-module names a more than once"),
        ("--lora-module tiny=d", "--lora-module and --served-name both have tiny"),
        (f"{ONE} --layers 1,2", "--layers needs --parallelism Pipeline"),
        (f"{ONE} {PIPELINE} --layers 3", "--layers must be 2 numbers from 1 up"),
        (f"{ONE} {PIPELINE} --layers 3,0", "--layers must be 2 numbers from 1 up"),
        (f"{ONE} {PIPELINE} --layers 3;1", "argument --layers: '3;1' is not a list of numbers"),
        (f"{ONE} --backend mpi", "argument --backend: invalid choice: 'mpi'"),
        ("--speed 11", "unrecognized arguments: --speed 11"),
    ],
)
def test_wrong_flags_end_the_process_with_a_reason(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        EngineFlags.from_argv([*LEAST.to_argv(), *words.split()])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]  # the line that the agent shows
    assert last.startswith(f"engine: error: {error}")


def test_a_flag_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EngineFlags.from_argv(["--model-dir", "/m"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("engine: error: the following arguments are required: --replica,")


def test_some_flags_alone_are_written() -> None:
    words = engine_flags.to_argv(
        model_dir=Path("/m"), context_length=64, kv_bits=None, adapter=Path("/a")
    )
    assert words == ["--model-dir", "/m", "--context-length", "64", "--adapter", "/a"]


def test_a_running_engine_is_identified_by_its_command_line() -> None:
    argv = ["/usr/bin/python3", "-m", "engine", *GROUP.to_argv(), "--flag-of-a-later-version", "1"]
    assert EngineIdentity.from_argv(argv) == EngineIdentity(
        replica="tiny-0",
        replica_uid="u",
        node=GROUP.node,
        served_names=("tiny", "fast"),
        host="::1",
        port=4100,
        epoch=3,
    )
    argv += ["--memory-limit-bytes", "7"]
    found = EngineIdentity.from_argv(argv)
    assert found is not None
    assert found.memory_limit_bytes == 7


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["vim", "engine"],
        ["python", "-m", "engine.golden", "--model-dir", "/m"],
        ["python", "-m", "other", "--served-name", "engine"],
        ["python", "-m", "engine", "--port", "none"],
    ],
)
def test_other_processes_are_no_engines(argv: list[str]) -> None:
    assert EngineIdentity.from_argv(argv) is None


def test_the_process_of_the_golden_question_is_identified() -> None:
    assert engine_flags.is_golden(["python", "-m", engine_flags.GOLDEN_MODULE, "--model-dir", "/m"])
    assert not engine_flags.is_golden(["python", "-m", engine_flags.MODULE])


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (LEAST, "http://127.0.0.1:4100"),
        (GROUP, "http://[::1]:4100"),
        (SOCKET, "unix:/s/mac-1/4100.sock"),
    ],
)
def test_an_engine_is_found_where_it_listens(flags: EngineFlags, url: str) -> None:
    assert flags.address().url == url
    found = EngineIdentity.from_argv(["python", "-m", "engine", *flags.to_argv()])
    assert found is not None
    assert found.address.url == url


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (LEAST.to_argv()[:-2], "exactly one of --socket and --port is needed"),
        ([*LEAST.to_argv(), "--socket", "/s"], "exactly one of --socket and --port is needed"),
        ([*SOCKET.to_argv(), "--host", "::1"], "--host needs --port"),
        ([*LEAST.to_argv()[:-2], "--socket", "s"], "argument --socket: unix:'s' is not https://HOST:PORT, http://HOST:PORT or unix:/PATH"),
    ],
)  # fmt: skip
def test_an_engine_listens_in_one_place(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        EngineFlags.from_argv(words)
    assert f"engine: error: {error}" in capsys.readouterr().err.splitlines()[-1]


def test_folders_of_modules_may_contain_the_separator() -> None:
    assert MODULES.adapters() == {"tiny:law": Path("/m/law"), "tiny:a": Path("/m/a=b")}
    assert LEAST.adapters() == {}
