"""What of fleetctl's own help is written down: a page with every verb, and the lines of `fleetctl --help`."""

from collections.abc import Iterator

import click

from fleetctl.__main__ import main
from fleetctl.cli.verb_table import SECTIONS

# Of a page that is read in an editor, and of a terminal that shows it.
_WIDTH = 100

_HEAD = """# fleetctl

Every verb with its flags, as `fleetctl VERB --help` prints it. Written by `make docs`; how verbs are used together says
[operations/fleetctl.md](../operations/fleetctl.md).
"""


def page() -> str:
    """Return the reference: a section for each verb, in the order of `fleetctl --help`."""
    root = _context(None, "fleetctl", main)
    order = [name for names in SECTIONS.values() for name in names]
    names = [*order, *(n for n in main.list_commands(root) if n not in order)]
    parts = [_HEAD, _block("fleetctl", main.get_help(root))]
    for name in names:
        command = main.get_command(root, name)
        if command is not None and not command.hidden:
            parts += _verb(root, name, command)
    return "\n".join(parts)


def _context(parent: click.Context | None, name: str, command: click.Command) -> click.Context:
    return click.Context(
        command,
        parent=parent,
        info_name=name,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        help_option_names=["-h", "--help"],
    )


def _verb(parent: click.Context, name: str, command: click.Command) -> Iterator[str]:
    context = _context(parent, name, command)
    yield _block(context.command_path, command.get_help(context))
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None and not found.hidden:
                yield from _verb(context, inner, found)


def _block(title: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```text\n{lines}\n```\n"


def summaries() -> str:
    """Return the module with a line for each verb."""
    root = click.Context(main)
    lines = []
    for name in main.list_commands(root):
        command = main.get_command(root, name)
        assert command is not None  # it is in the list
        if not command.hidden:
            text = command.get_short_help_str(limit=100).replace('"', "'")
            lines.append(f'    "{name}": "{text}",')
    return "\n".join((
        '"""What `fleetctl --help` says about each verb, so that it need not import them. Written by `make docs`."""',
        "",
        "SUMMARIES: dict[str, str] = {",
        *lines,
        "}",
        "",
    ))  # fmt: skip
