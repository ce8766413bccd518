"""Exit codes of fleetctl: Ctrl-C, a full disk, a missing store; `fleetctl help`; switches as kubectl spells them."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typing_extensions import override

from fleetctl.__main__ import main
from fleetctl.cli.program import RootGroup
from fleetctl.cli.spellings import translate_switches
from store.etcd.error_mapping import explain_connection_error
from tests.support.fleet import fleetctl


def fails_with(error: BaseException) -> RootGroup:
    """Return a program whose only verb raises this."""

    class Failing(RootGroup):
        @override
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            raise error

    return Failing(name="program", verbs={"fail": "nowhere:nothing"})


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        pytest.param(KeyboardInterrupt(), 130, "error: interrupted\n", id="ctrl-c-while-a-verb-is-imported"),
        pytest.param(FULL, 1, "error: cannot write the output: No space left on device\n", id="full"),
        pytest.param(
            ExceptionGroup("tasks", [ExceptionGroup("more", [FULL])]),
            1,
            "error: cannot write the output: No space left on device\n",
            id="full-in-a-task",
        ),
        pytest.param(
            OSError(errno.EIO, "Input/output error", "/x/file"),
            1,
            "error: cannot write /x/file: Input/output error\n",
            id="a-file",
        ),
    ],
)  # fmt: skip
def test_exit_codes(
    error: BaseException,
    code: int,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with (tmp_path / "out").open("w") as out:
        # The command discards its own output only, not the output of the tests.
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            fails_with(error).main(["fail"])
    assert (ended.value.code, capsys.readouterr().err) == (code, expected)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "gone"), ExceptionGroup("x", [KeyError()])]
)
def test_other_errors_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)):
        fails_with(error).main(["fail"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_unwritable_output_is_an_error() -> None:
    code = (
        "import sys\n"
        "from fleetctl.__main__ import main\n"
        "main(['api-resources'], prog_name='fleetctl')"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (
        1,
        b"error: cannot write the output: No space left on device\n",
    )


def test_messages_do_not_quote_grpc() -> None:
    expected = "FAILED_PRECONDITION: unix:/x/client:1: connect failed: addr: unix:/x/client:1 error: No such file or directory"
    assert explain_connection_error("unix:/x/client:1", expected) == "no etcd runs there"


async def test_help_verb() -> None:
    assert (await fleetctl("help")).out == (await fleetctl("--help")).out
    shown = await fleetctl("help", "config", "use-context")
    assert shown.out == (await fleetctl("config", "use-context", "--help")).out
    typo = await fleetctl("help", "aply")
    assert (typo.code, typo.err.splitlines()[-1]) == (
        2,
        "Error: unknown command 'aply'. Did you mean apply?",
    )
    deep = await fleetctl("help", "get", "md")
    assert "fleetctl get has no subcommand md" in deep.err


def commands(
    group: click.Group, names: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command of the tree with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*names, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*names, name))


def test_every_switch_is_taken_in_kubectls_spelling() -> None:
    """`--wait=false` is `--no-wait`, `--watch=false` is nothing, `--no-headers=true` is `--no-headers`."""
    tried = 0
    for names, command in commands(main):
        parser = command.make_parser(click.Context(command))
        for option in command.params:
            if not isinstance(option, click.Option) or not option.is_bool_flag:
                continue
            for flag, meaning in [
                *((f, True) for f in option.opts),
                *((f, False) for f in option.secondary_opts),
            ]:
                for text, value in (("true", meaning), ("False", not meaning)):
                    args = translate_switches(command, [f"{flag}={text}"])
                    parsed, rest, _ = parser.parse_args(list(args))
                    # Without an opposite, false leaves the switch out.
                    expected = value if value or option.secondary_opts else None
                    actual = parsed[option.name] if args else None
                    assert (actual, rest) == (expected, []), (names, flag, text)
                    tried += 1
    assert tried > 200
