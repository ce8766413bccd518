"""`fleetctl help VERB`: the same as `fleetctl VERB --help`."""

import click


@click.command("help")
@click.argument("verb", nargs=-1)
def show_help(verb: tuple[str, ...]) -> None:
    """Show the help of a command, the same as its --help."""
    context = click.get_current_context().find_root()
    for word in verb:
        command = context.command
        if not isinstance(command, click.Group):
            raise click.UsageError(f"{context.command_path} has no subcommand {word}")
        name, found, _ = command.resolve_command(context, [word])
        if found is None:  # click reports the error, unless it completes words
            return
        context = found.context_class(found, info_name=name, parent=context)
    click.echo(context.get_help(), color=context.color)
