"""What the types say of a field: its siblings, its default, its description. Pure."""

from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from manifests.tree import Path
from schemas.duration import Unit
from schemas.meta import FLEET_OWNED, ObjectMeta


def known(model: type[BaseModel], path: Path) -> tuple[str, ...]:
    """Return the names that users may write in the mapping at the path."""
    found = _type_at(model, path)
    if not _is_model(found):
        return ()
    theirs = (
        name for name in found.model_fields if found is not ObjectMeta or name not in FLEET_OWNED
    )
    names = tuple(found.model_fields[name].alias or name for name in theirs)
    return tuple(name for name in names if path or name != "status")


def default(model: type[BaseModel], path: Path) -> Any:
    """Return the field's default; None if it has none."""
    field = _field_at(model, path)
    return None if field is None or field.is_required() else field.get_default()


def description(model: type[BaseModel], path: Path) -> str:
    """Return what the field says, from its docstring."""
    field = _field_at(model, path)
    return (field.description or "").split("\n")[0] if field is not None else ""


def unit(model: type[BaseModel], path: Path) -> Unit | None:
    """Return what a number there would be meant in; None where no duration is expected."""
    field = _field_at(model, path)
    if field is None:
        return None
    options = [arg for arg in get_args(field.annotation) if hasattr(arg, "__metadata__")]
    marks = [*field.metadata, *(mark for option in options for mark in option.__metadata__)]
    # The last is of the narrowest type.
    return next((mark for mark in reversed(marks) if isinstance(mark, Unit)), None)


def _field_at(model: type[BaseModel], path: Path) -> FieldInfo | None:
    parent = _type_at(model, path[:-1])
    return _field(parent, path[-1]) if path and _is_model(parent) else None


def _field(model: type[BaseModel], name: str | int) -> FieldInfo | None:
    return next((f for f in model.model_fields.values() if f.alias == name), None)


def _type_at(model: type[BaseModel], path: Path) -> Any:
    """Return the type of the value at the path; None where the types do not lead."""
    found: Any = model
    for part in path:
        if _is_model(found):
            field = _field(found, part)
            found = _bare(field.annotation) if field is not None else None
        elif get_origin(found) is tuple:
            found = _bare(get_args(found)[0])
        elif get_origin(found) is dict:
            found = _bare(get_args(found)[1])
        else:
            return None
    return found


def _bare(annotation: Any) -> Any:
    """Return the type without Annotated[] and without `| None`."""
    if hasattr(annotation, "__metadata__"):
        return _bare(get_args(annotation)[0])
    options = [arg for arg in get_args(annotation) if arg is not NoneType]
    if NoneType in get_args(annotation) and len(options) == 1:
        return _bare(options[0])
    return annotation


def _is_model(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel)
