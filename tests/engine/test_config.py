"""Sources of the engine's configuration; tests/schemas/wire/test_engine_config.py tests its fields."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.wire.engine_config import EngineConfig, GroupConfig

PLACE = GroupConfig(rank=0, world_size=2, host="127.0.0.1", port=1)
READ = "import sys; from engine import config; print(config.read(sys.argv[1:]).to_json().decode())"


def read(stdin: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", READ, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=60)


def test_it_is_read_from_standard_input_or_a_file(tmp_path: Path) -> None:
    large = EngineConfig(
        model_dir=Path("/m"), adapters={f"a{number}": Path("/m" * 400) for number in range(300)}
    )
    raw, file = large.to_json(), tmp_path / "engine.json"
    assert len(raw) > 200_000
    file.write_bytes(raw)
    for done in (read(raw, *large.identity.to_argv()), read(b"", "--config", str(file))):
        assert EngineConfig.model_validate_json(done.stdout) == large, done.stderr


@pytest.mark.ci
@pytest.mark.parametrize(
    ("raw", "arguments", "error"),
    [
        (b"", [], "cannot read the configuration: it is empty: give the JSON on standard input"),
        (b" " * (1 << 20) + b"{}", [], "cannot read the configuration: it has more than 1 MiB"),
        (b"", ["--config", "/none"], "cannot read the configuration: [Errno 2] No such file"),
        (b"{", [], "the configuration is wrong: Invalid JSON"),
        (b"{}", [], "the configuration is wrong: modelDir: Field required"),
        (
            b'{"modelDir": "/m", "secrets": "s3cret"}',
            [],
            "the configuration is wrong: secrets: Extra inputs are not permitted",
        ),
        (b'{"modelDir": "/m"}', ["replica=other"], "the command line names another engine"),
        (
            EngineConfig(model_dir=Path("/m"), group=PLACE).to_json(),
            [],
            "a rank needs the secret of its group: group.secret",
        ),
    ],
)
def test_what_cannot_be_read_ends_the_process(raw: bytes, arguments: list[str], error: str) -> None:
    done = read(raw, *arguments)
    assert done.returncode == 2
    last = done.stderr.decode().splitlines()[-1]  # the line that the agent shows
    assert last.startswith(f"engine: error: {error}")
    assert "s3cret" not in last


def test_a_writer_that_never_ends_is_not_waited_for() -> None:
    command = f"import engine.config as c; c._READ_TIMEOUT_S = 0.1; {READ}"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps({"modelDir": "/m"}).encode())
        process.stdin.flush()
        assert process.wait(60) == 2
        assert b"standard input did not end within" in process.stderr.read()
