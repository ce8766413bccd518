"""Whether a kind has a field that `--field-selector` names, by its schema. Pure, but imports every model asked for."""

import difflib
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from fleetctl import explain_schema
from fleetctl.errors import FleetctlError
from fleetctl.explain_schema import Field, Model
from fleetctl.kinds import API_KEYS
from schemas.apikey import ApiKey
from schemas.kinds import Kind
from schemas.meta import ObjectMeta

# Of an API key, what its metadata says is stored beside the rest; the hash is shown to nobody.
_NOT_IN_SPEC = ("name", "created", "hash")


@cache
def _model(kind: Kind) -> Model:
    if kind != API_KEYS:
        return explain_schema.model_of(kind.name)
    meta, spec = ObjectMeta.model_json_schema(), ApiKey.model_json_schema()
    fields = {name: of for name, of in spec["properties"].items() if name not in _NOT_IN_SPEC}
    parts = {"metadata": meta, "spec": {**spec, "properties": fields}}
    definitions = {**meta.get("$defs", {}), **spec.get("$defs", {})}
    return Model(kind=kind.name, root={"properties": parts}, definitions=definitions)


def refuse_unknown(path: tuple[str, ...], kinds: Sequence[Kind]) -> None:
    """Refuse a field that none of the kinds has, or that holds several values.

    Raises:
        FleetctlError: it is one; with the nearest.

    """
    wrong = [_wrong(path, _model(kind)) for kind in kinds]
    if all(one.said for one in wrong):
        # Whoever means several kinds, means with this field the one that has most of it.
        said = max(wrong, key=lambda one: one.depth).said
        raise FleetctlError(f"--field-selector: {said}")


class _Wrong(NamedTuple):
    """What is wrong with selecting by a field."""

    depth: int
    """How many names of the path there are."""
    said: str = ""
    """Nothing if it can be done."""


def _wrong(path: tuple[str, ...], model: Model) -> _Wrong:
    schema, type_ = model.root, ""
    for number, name in enumerate(path):
        if type_.startswith("map["):
            return _Wrong(number)  # labels: any name may be one
        above = ".".join(path[:number])
        if type_.startswith("[]"):
            return _Wrong(number, f"{above} holds several values; name a field of one")
        fields = {field.name: field for field in model.fields(schema)}
        if name not in fields:
            return _Wrong(number, _not_supported(path, above, fields))
        schema, type_ = fields[name].schema, fields[name].type
    is_one = not type_.startswith(("[]", "map[")) and not any(model.parts(schema))
    several = f"{'.'.join(path)} holds several values; name a field of one"
    return _Wrong(len(path), "" if is_one else several)


def _not_supported(path: tuple[str, ...], above: str, fields: dict[str, Field]) -> str:
    """Return the refusal of a field, in kubectl's words."""
    name = path[len(above.split(".")) if above else 0]
    low = {one.lower(): one for one in fields}
    near = difflib.get_close_matches(name.lower(), low, n=1)
    if near:
        # What comes below it is right, or will be told next.
        hint = f"did you mean {'.'.join((above, low[near[0]])).lstrip('.')}?"
    elif fields:
        hint = f"{above} has {', '.join(fields)}" if above else f"there are {', '.join(fields)}"
    else:
        hint = f"{above} has no fields"
    return f"field label not supported: {'.'.join(path)}; {hint}"
