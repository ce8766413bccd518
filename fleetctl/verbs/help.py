"""`fleetctl help VERB`: what `fleetctl VERB --help` says, for those who ask this way."""

import click


@click.command("help")
@click.argument("verb", nargs=-1)
def show_help(verb: tuple[str, ...]) -> None:
    """Show the help of a verb: the same as its --help."""
    context = click.get_current_context().find_root()
    for word in verb:
        command = context.command
        if not isinstance(command, click.Group):
            raise click.UsageError(
                f"{context.command_path} has no verbs of its own, such as {word}"
            )
        name, found, _ = command.resolve_command(context, [word])
        if found is None:  # click itself refuses, unless it only completes
            return
        context = click.Context(found, info_name=name, parent=context)
    click.echo(context.command.get_help(context), color=context.color)
