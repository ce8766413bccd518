"""Unknown verbs, the sections of the help, and start-up imports."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator

import click
import pytest

from fleetctl.__main__ import main
from fleetctl.cli.spellings import KIND_SYNONYMS, VERB_SYNONYMS
from fleetctl.cli.summaries import SUMMARIES
from fleetctl.cli.verb_table import SECTIONS
from fleetctl.objects.kind_args import WITH_API_KEYS
from schemas import kinds
from tests.support.fleet import fleetctl, from_scratch
from tests.support.fleetctl_runner import MemoryFleet, run_fleetctl


async def test_the_whole_error_about_an_unknown_verb() -> None:
    done = await fleetctl("aply")
    assert done.err == (
        "Usage: fleetctl [OPTIONS] COMMAND [ARGS]...\n"
        "Try 'fleetctl --help' for help.\n"
        "\n"
        "Error: unknown command 'aply'. Did you mean apply?\n"
    )


def test_every_synonym_exists() -> None:
    root = click.Context(main)
    names = {name for words, _ in _commands(main, ()) for name in words.split()}
    assert VERB_SYNONYMS.keys() & set(main.list_commands(root)) == {"status"}
    assert {name for names in VERB_SYNONYMS.values() for name in names.split()} <= names | {"model"}
    assert set(KIND_SYNONYMS.values()) <= {kind.plural for kind in WITH_API_KEYS}
    assert all(kinds.by_alias(word) is None for word in KIND_SYNONYMS)


def test_every_verb_is_in_one_section_of_the_help() -> None:
    shown = [name for names in SECTIONS.values() for name in names]
    verbs = [name for name in main.list_commands(click.Context(main)) if not name.startswith("_")]
    assert sorted(shown) == verbs
    assert set(SUMMARIES) == set(verbs)


async def test_the_help_cuts_no_sentence_off() -> None:
    done = await fleetctl("--help")
    assert not re.findall(r"^  .*\.\.\.$", done.out, re.MULTILINE)
    inner = await fleetctl("rollout", "--help")
    assert "the earlier one serves again." in " ".join(inner.out.split())


_MODULES = "import json, sys\n{}\nprint(json.dumps(sorted(sys.modules)))"
# The import of each takes a large part of the time that `fleetctl get` should take, or more.
_DEAR = {
    "pydantic",
    "asyncio",
    "platformdirs",
    "importlib.metadata",
    "grpc",
    "ssl",
    "tomllib",
    "aiohttp",
    "ruamel",
}


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import fleetctl.cli.connect, fleetctl.cli.errors, fleetctl.cli.terminal", id="what-all-verbs-import"),
        pytest.param(
            "from fleetctl.__main__ import main; main(['--help'], standalone_mode=False)", id="help"
        ),
        pytest.param(
            "from fleetctl.__main__ import main\n"
            "try: main(['aply'], standalone_mode=False)\n"
            "except Exception: pass",
            id="typo",
        ),
    ],
)  # fmt: skip
async def test_help_imports_no_verb(code: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _MODULES.format(code)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    modules = set(json.loads(out.splitlines()[-1]))
    assert "click" in modules
    assert modules & _DEAR == set()


async def test_the_version_and_the_help() -> None:
    assert (await fleetctl("--version")).out.startswith("fleetctl: ")
    code, out, err = await from_scratch(("--help",), b"")
    assert (code, err) == (0, b"")
    text = out.decode()
    for title in SECTIONS:
        assert f"\n{title}:\n" in text
    assert "__complete" not in text


# They run a fleet on this machine; init-auth is for an etcd of one's own.
_WITHOUT_ETCD = {"up", "demo"}
_WITHOUT_DATA_DIR = {"init-auth"}


def _commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands(found, (*words, name))
        return
    yield " ".join(words), {name for param in command.params for name in param.opts}


def test_verbs_that_use_a_fleet_take_the_same_flags_for_it() -> None:
    """A context, --data-dir and --etcd name a fleet to every verb alike, apart from a few that cannot use one of them."""
    one_of = ("--data-dir", "--etcd", "--context")
    partial = {
        words
        for words, flags in _commands(main, ())
        if 0 < sum(flag in flags for flag in one_of) < len(one_of)
        and not words.startswith("config ")
    }
    assert partial == _WITHOUT_ETCD | _WITHOUT_DATA_DIR


async def test_connection_flags_are_listed_once_and_taken_everywhere(fleet: MemoryFleet) -> None:
    listed = (await run_fleetctl("options")).out
    assert "--etcd-ca" in listed
    assert "--api-key-file" in listed
    for verb in ("get", "chat", "logs"):
        shown = (await run_fleetctl(verb, "--help")).out
        assert "--etcd" not in shown
        assert shown.endswith("\nConnection flags: `fleetctl options`\n")
    assert (await fleet.ctl("get", "nodes")).code == 0
