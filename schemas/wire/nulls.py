"""The rule that null is the same as leaving a member out, for the bodies of all APIs. Pure."""

from typing import Any, Final

# Members that hold a JSON schema or the client's own data, in which null has a meaning.
_CLIENT_DATA: Final = frozenset(
    {
        "arguments", "chat_template_kwargs", "format", "guided_json", "input_schema", "json", "output_schema",
        "parameters", "schema",
    }
)  # fmt: skip


def drop_nulls(body: dict[str, Any]) -> None:
    """Remove the members that are null from a body and from the objects in it, but not from schemas and client data."""
    pending: list[Any] = [body]
    while pending:
        node = pending.pop()
        if type(node) is not dict:
            pending += [value for value in node if type(value) is dict]
            continue
        if None in node.values():
            for name in [name for name, value in node.items() if value is None]:
                del node[name]
        # `input` holds the items of a request, or the arguments of a call of Anthropic's API.
        pending += [
            value
            for name, value in node.items()
            if (kind := type(value)) is list
            or (kind is dict and name not in _CLIENT_DATA and name != "input")
        ]
