"""A group of verbs whose modules are imported on use: what one of them imports is paid for by that one alone."""

import importlib
from collections.abc import Mapping
from typing import Any

import click
from typing_extensions import override


class LazyGroup(click.Group):
    """A group that knows where its commands are; `verbs` maps each to "module:function"."""

    def __init__(self, *args: Any, verbs: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verbs = verbs

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._verbs)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._verbs:
            return None
        module, _, function = self._verbs[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command
