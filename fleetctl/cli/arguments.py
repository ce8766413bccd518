"""Click options that several verbs share, and the parsers of their values."""

import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import click
from typing_extensions import override

# kubectl's meaning of a negative --timeout.
_WEEK_S = 7 * 24 * 3600.0
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

_LONGEST_REASON = 500
_MAX_URLS = 16


def _check_reason(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
    if len(text) > _LONGEST_REASON or not text.isprintable():
        raise click.UsageError(
            f"--reason: expected one line of at most {_LONGEST_REASON} characters"
        )
    return text


selector_option = click.option(
    "-l", "--selector", default="", help="Select objects by label: k=v,k!=v,k,!k."
)
files_option = click.option(
    "-f", "--filename", "files", multiple=True, help="Select the objects named in these manifests."
)
recursive_option = click.option(
    "-R", "--recursive", is_flag=True, help="With -f: include subfolders."
)
all_option = click.option("--all", "is_all", is_flag=True, help="Select all objects of the kind.")
manager_option = click.option(
    "--field-manager",
    "manager",
    default="fleetctl",
    show_default=True,
    help="Field manager to record as the owner of the fields.",
)


reason_option = click.option(
    "--reason",
    default="",
    metavar="TEXT",
    callback=_check_reason,
    help="Why you make this change; `fleetctl changes` shows it.",
)


class DryRunChoice(click.Choice[str]):
    """The values of --dry-run; the error for a missing or unknown value shows the valid forms."""

    @override
    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            forms = " or ".join(
                f"--dry-run={choice}" for choice in self.choices if choice != "none"
            )
            known = ", ".join(map(repr, self.choices))
            problem = f"{value!r} is not one of {known}" if value else "a value is required"
            self.fail(f"{problem}; write {forms}", param, ctx)
        return super().convert(value, param, ctx)


def dry_run(
    values: Sequence[str], help_text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for a --dry-run option with these values; the first is the default."""
    return click.option(
        "--dry-run",
        type=DryRunChoice(values),
        default=values[0],
        show_default=True,
        is_flag=False,
        flag_value="",  # the flag alone, as in old kubectl: DryRunChoice shows the valid forms
        metavar=f"[{'|'.join(values)}]",
        help=help_text,
    )


def dry_run_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --dry-run and --reason."""
    help_text = "Write nothing. client: only show what would be written; server: also check it against the store."
    return reason_option(dry_run(("none", "client", "server"), help_text)(command))


def result_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add -o and --dry-run."""
    output = click.option(
        "-o",
        "--output",
        type=click.Choice(["name", "yaml", "json"]),
        help="Print each object instead of a status line.",
    )
    return output(dry_run_option(command))


def manifests_option(*, is_required: bool = True) -> Callable[..., Any]:
    """Return the decorator for -f of verbs that read manifests."""
    return click.option(
        *("-f", "--filename", "files"),
        multiple=True,
        required=is_required,
        help="Manifest file, folder, or - for standard input. Can be repeated.",
    )


def output_option(*formats: str, text: str | None = None) -> Callable[..., Any]:
    """Return the decorator for -o with these formats; the first is the default."""
    return click.option(
        *("-o", "--output"),
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help=text,
    )


def timeout_option(default: str, text: str) -> Callable[..., Any]:
    """Return the decorator for --timeout, a duration."""
    return click.option("--timeout", default=default, show_default=True, help=text)


def tree_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option -o of a verb whose text is for people: json or yaml for programs."""
    return click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help=help_text)


def parse_duration(text: str, flag: str = "") -> float:
    """Return the seconds of "90", "30s", "5m", "1h30m" or "7d"; `flag` begins the error.

    Raises:
        click.UsageError: the text is not a duration.

    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return float(text)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)", text)
    if not parts or "".join(n + u for n, u in parts) != text:
        head = f"{flag}: " if flag else ""
        raise click.UsageError(f"{head}{text!r} is not a duration; write 30s, 5m, 1h30m or 7d")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def parse_timeout(text: str) -> float:
    """Return the seconds of a --timeout value; a negative one means a week. Raises as `parse_duration`."""
    if not text.startswith("-"):
        return parse_duration(text)
    return _WEEK_S if parse_duration(text[1:]) else 0.0


def parse_urls(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of gateways without trailing slashes, each once; one text may hold several, separated by commas.

    Raises:
        click.UsageError: one is not an HTTP URL, or there are more than 16.

    """
    urls = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    for url in urls:
        if not _is_url(url):
            raise click.UsageError(f"--gateway {url}: expected http://HOST:PORT")
    if len(urls) > _MAX_URLS:
        raise click.UsageError(f"--gateway: {len(urls)} gateways are given; at most {_MAX_URLS}")
    return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or a bracket is missing
        return False
