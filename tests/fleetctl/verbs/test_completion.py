"""Completion: the scripts in real shells, and the candidates of `fleetctl __complete`.

These run as real processes: `__complete` changes the parameter types of the commands, so it must not share a process.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, fleetctl
from tests.support.fleetctl_runner import run_fleetctl

_LIMIT_S = 30.0
MANIFEST = """apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {name: %s}
spec: {model: {path: /models/x}}
"""


def shell(name: str) -> pytest.MarkDecorator:
    """Skip a test where the shell is not installed: macOS has bash and zsh, and no fish."""
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
async def named(shared: Fleet) -> Fleet:
    """Return a store with two deployments and an API key in it."""
    await shared.applied(MANIFEST % "qwen-coder" + "---\n" + MANIFEST % "quark")
    key = await shared.ctl("create", "apikey", "phone-2")
    assert key.code == 0, key.err
    return shared


@pytest.fixture(autouse=True)
def in_reach(named: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Put fleetctl on PATH and the store into the environment, in a folder with two files."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FLEET_ETCD", str(named.etcd.address))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    (tmp_path / "fleet.yaml").touch()
    (tmp_path / "flows").mkdir()
    monkeypatch.chdir(tmp_path)


async def candidates_of(shell: str, line: str) -> list[tuple[str, str]]:
    """Return type and text of each candidate."""
    done = await fleetctl("__complete", shell, line)
    assert (done.code, done.err) == (0, "")
    return [(parts[0], parts[1]) for parts in (row.split("\t") for row in done.out.splitlines())]


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        pytest.param("fleetctl appl", [("whole", "apply")], id="verb"),
        pytest.param("fleetctl config rename-c", [("whole", "rename-context")], id="subverb"),
        pytest.param("fleetctl get modeld", [("whole", "modeldeployments")], id="kind"),
        pytest.param("fleetctl get api", [("whole", "apikeys")], id="api-keys"),
        pytest.param("fleetctl label api", [], id="what-has-no-labels"),
        pytest.param("fleetctl delete ak pho", [("whole", "phone-2")], id="names-of-api-keys"),
        pytest.param("fleetctl rotate ", [("whole", "apikeys")], id="what-can-be-rotated"),
        pytest.param("fleetctl rotate apikey pho", [("whole", "phone-2")], id="names-of-keys-to-rotate"),
        pytest.param("fleetctl describe apikey/pho", [("whole", "apikey/phone-2")], id="api-key"),
        pytest.param("fleetctl get md ", [("whole", "quark"), ("whole", "qwen-coder")], id="names"),
        pytest.param("fleetctl get md quark q", [("whole", "qwen-coder")], id="not-those-that-are-there"),
        pytest.param("fleetctl describe md/qw", [("whole", "md/qwen-coder")], id="kind-and-name"),
        pytest.param("fleetctl delete md --ignore-not-found qw", [("whole", "qwen-coder")], id="behind-a-flag"),
        pytest.param("fleetctl rollout status qu", [("whole", "quark")], id="of-a-deployment"),
        pytest.param("fleetctl scale ", [("whole", "modeldeployments")], id="what-can-be-scaled"),
        pytest.param("fleetctl top ", [("whole", "nodes"), ("whole", "models")], id="what-is-measured"),
        pytest.param("fleetctl top models qu", [("whole", "quark")], id="names-of-what-is-measured"),
        pytest.param("fleetctl events --for model", [("plain", "modeldeployment/"), ("plain", "modelroute/"),
                     ("plain", "modelpolicy/")], id="kind-of-a-reference"),
        pytest.param("fleetctl changes --for md/qu", [("whole", "md/quark")], id="reference"),
        pytest.param("fleetctl explain md.spec.pla", [("whole", "md.spec.placement")], id="field"),
        pytest.param("fleetctl get md --no-h", [("whole", "--no-headers")], id="flag"),
        pytest.param("fleetctl get md --output=js", [("whole", "json"), ("plain", "jsonpath=")], id="value-of-a-flag"),
        pytest.param("fleetctl apply -f ", [("file", "")], id="file"),
        pytest.param("fleetctl get nonsense ", [], id="no-such-kind"),
        pytest.param("fleetctl get md --etcd http://127.0.0.1:1 ", [], id="no-store"),
        pytest.param("fleetctl nonsense ", [], id="no-such-verb"),
        pytest.param("fleetctl get md 'unfinished", [], id="open-quote"),
        pytest.param("fleetctl __comp", [], id="not-for-people"),
    ],
)  # fmt: skip
async def test_candidates_at_the_end_of_a_line(
    line: str, candidates: list[tuple[str, str]]
) -> None:
    assert await candidates_of("bash", line) == candidates


async def test_other_shells_pass_a_flag_and_its_value_as_one_word() -> None:
    assert ("whole", "--output=json") in await candidates_of("zsh", "fleetctl get md --output=js")


async def test_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETCTL_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("[contexts.lab]\n[contexts.home]\n")
    assert await candidates_of("bash", "fleetctl config use-context l") == [("whole", "lab")]
    assert await candidates_of("bash", "fleetctl --context ho") == [("whole", "home")]
    (tmp_path / "config.toml").write_text("[nonsense")
    assert await candidates_of("bash", "fleetctl --context ho") == []


async def printed(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(_LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


_IN_BASH = """
program="${1%% *}"
source <("$program" completion bash)
complete -p "$program"
line="$1"; COMP_LINE="$line"; COMP_POINT=${#line}
COMP_WORDS=($line); [[ "$line" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_fleetctl "$program"
printf '<%s>\n' "${COMPREPLY[@]}"
"""


@pytest.mark.ci
@shell("bash")
@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("fleetctl get md q", ["<quark >", "<qwen-coder >"]),
        ("fleetctl get md/qw", ["<md/qwen-coder >"]),
        ("fleetctl apply -f fl", ["<fleet.yaml>", "<flows>"]),
        ("mlx-fleet get md/qw", ["<md/qwen-coder >"]),
    ],
)
async def test_bash(line: str, reply: list[str]) -> None:
    first, *found = (await printed("bash", "--norc", "-c", _IN_BASH, "bash", line)).splitlines()
    assert first == f"complete -o nospace -F _fleetctl {line.split()[0]}"
    assert sorted(found) == reply


@pytest.mark.ci
@shell("fish")
@pytest.mark.parametrize("program", ["fleetctl", "mlx-fleet"])
async def test_fish(program: str) -> None:
    words = ("get md q", "rollout stat", "apply -f flee")
    asked = "; ".join(f'complete -C "{program} {line}"' for line in words)
    out = await printed("fish", "--no-config", "-c", f"{program} completion fish | source; {asked}")
    shown = [line.partition("\t") for line in out.splitlines()]
    assert [text for text, _, _ in shown] == ["quark", "qwen-coder", "status", "fleet.yaml"]
    assert shown[2][2].startswith("Show the progress of a rollout")


class Keyboard:
    """A shell in a terminal, with its output."""

    def __init__(self, line: int) -> None:
        self._line = line
        self._news = asyncio.Event()
        self._shown = ""

    def take(self) -> None:
        with contextlib.suppress(OSError):  # Linux' way to say that nobody has the terminal open
            self._shown += os.read(self._line, 65536).decode(errors="replace")
        self._news.set()

    async def types(self, text: str, *, until: str) -> None:
        """Type, and wait for new output."""
        self._shown = ""
        os.write(self._line, text.encode())
        try:
            async with asyncio.timeout(_LIMIT_S):
                while until not in self._shown:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{until!r} was not shown, but {self._shown!r}") from None


@asynccontextmanager
async def interactive(*command: str) -> AsyncIterator[Keyboard]:
    """Run a shell in a terminal; it does not outlive the block."""
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    keyboard = Keyboard(ours)
    asyncio.get_running_loop().add_reader(ours, keyboard.take)
    try:
        yield keyboard
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        process.kill()
        await process.wait()
        os.close(ours)


@pytest.mark.ci
@shell("zsh")
async def test_zsh_at_a_terminal() -> None:
    """zsh's completion works only at a terminal."""
    async with interactive("zsh", "-f", "-i") as keyboard:
        load = "autoload -Uz compinit && compinit -D -u; source <(fleetctl completion zsh); echo lo''aded\n"
        await keyboard.types(load, until="loaded\r\n")
        await keyboard.types("fleetctl get md qw\t", until="qwen-coder ")
        await keyboard.types("\x15fleetctl rollout stat\t", until="status ")
        await keyboard.types("\x15fleetctl apply -f flee\t", until="fleet.yaml ")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
async def test_the_scripts_have_valid_syntax(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text((await run_fleetctl("completion", name)).out)
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    assert await printed(name, "-n", str(script)) == ""
