"""`fleetctl completion`: the script for the user's shell; and the hidden verb that the scripts ask."""

import click

from fleetctl.completion.scripts import SCRIPTS

_HELP = """Print a script that completes verbs, flags, kinds, names of objects and contexts in your shell.

\b
  bash:  echo 'source <(fleetctl completion bash)' >> ~/.bashrc
  zsh:   echo 'source <(fleetctl completion zsh)' >> ~/.zshrc    (after compinit)
  fish:  fleetctl completion fish > ~/.config/fish/completions/fleetctl.fish

Names of objects are asked of the store that the line means (--context, --etcd, ...), for two seconds at most.
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(sorted(SCRIPTS)))
def completion(shell: str) -> None:
    """Print a script that completes verbs, flags, kinds and names in your shell."""
    click.echo(SCRIPTS[shell], nl=False)


@click.command("__complete", hidden=True)
@click.argument("shell", type=click.Choice(sorted(SCRIPTS)))
@click.argument("line")
def answer(shell: str, line: str) -> None:
    """Say what may stand at the end of a line; for the scripts."""
    from fleetctl.completion import answering  # noqa: PLC0415 - the scripts are printed without it

    root = click.get_current_context().find_root().command
    click.echo("".join(answering.answers(root, shell, line)), nl=False)
