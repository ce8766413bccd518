"""Decoding of many documents of one model: to structs that are derived from the model, with equal parts shared. Pure.

The model in `schemas/` stays the only description of a document. Everything that this decoder accepts is equal to what
pydantic makes of the document; it leaves all others to pydantic, which accepts them or reports what is wrong.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
import msgspec
from msgspec.structs import asdict
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

M = TypeVar("M", bound=BaseModel)

# Values of one field that are remembered, and the longest text of one: deployments differ in a few fields, and have
# the rest in common with hundreds of others.
_REMEMBERED: Final = 1024
_LONGEST_BYTES: Final = 2048
# A document, and in it metadata and spec, are taken apart. The parts below them are shared as a whole.
_DEPTH: Final = 2
# Deriving costs as much as pydantic takes for so many documents; a command that reads a few never pays for it.
_FIRST: Final = 200
_STRICT: Final = ConfigDict(strict=True)
_PLAIN: Final = (str, int, bool, types.NoneType)
_BOUNDS: Final = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt)
# A frozen model without `__init__`: its slots are set one by one, at a third of the cost of `object.__setattr__`.
_SET_VALUES, _SET_FIELDS, _SET_EXTRA, _SET_PRIVATE = (
    vars(BaseModel)[slot].__set__
    for slot in (
        "__dict__",
        "__pydantic_fields_set__",
        "__pydantic_extra__",
        "__pydantic_private__",
    )
)


class DocumentDecoder(Generic[M]):
    """Decodes documents of one model with all of pydantic's checks; a part that was seen before is not checked again."""

    def __init__(self, model: type[M], *, first: int = _FIRST) -> None:
        """`first` documents are decoded by pydantic, before anything is derived."""
        self._model = model
        self._first = first
        self._parse: Callable[[bytes], msgspec.Struct] | None = None
        self._build: Callable[[Any], M]

    def decode(self, raw: bytes) -> M:
        """Return the document, which must not have its version any more.

        Raises:
            ValidationError: it is not a document of the model.

        """
        if self._parse is not None:
            try:
                return self._build(self._parse(raw))
            except ValueError:  # of msgspec, of pydantic, or of the model's own checks
                return self._model.model_validate_json(raw)  # accepts it, or reports what is wrong
        if self._first >= 0:
            self._first -= 1
            if self._first < 0 and _is_derivable(self._model):
                struct, self._build = _derive(self._model, _DEPTH)
                self._parse = msgspec.json.Decoder(struct).decode
        return self._model.model_validate_json(raw)


def _is_derivable(annotation: object) -> bool:
    """Return whether an annotation is a model whose own validators, if any, only check the finished model."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return False
    own = annotation.__pydantic_decorators__
    return not (own.field_validators or own.root_validators or own.validators) and all(
        check.info.mode == "after" for check in own.model_validators.values()
    )


def _derive(model: type[M], depth: int) -> tuple[type[msgspec.Struct], Callable[[Any], M]]:
    """Return the struct of a model's JSON, and the function that makes the model of it."""
    members: list[tuple[str, Any, Any]] = []
    shared: dict[str, _SharedPart] = {}
    nested: dict[str, Callable[[Any], BaseModel]] = {}
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        wanted = _struct_type(inner, field.metadata)
        if wanted is None and depth > 1 and not field.metadata and _is_derivable(inner):
            wanted, nested[name] = _derive(inner, depth - 1)
        elif wanted is None:
            wanted, shared[name] = msgspec.Raw, _SharedPart(field)
        members.append((name, wanted, msgspec.UNSET))
    struct = msgspec.defstruct(
        model.__name__,
        members,
        rename={name: field.alias or name for name, field in model.model_fields.items()},
        forbid_unknown_fields=True,
        gc=False,
    )
    return struct, _ModelBuilder(model, shared, nested).build


def _struct_type(annotation: Any, metadata: Sequence[Any] = ()) -> Any:
    """Return the type that msgspec checks exactly as pydantic does in strict mode; None if there is none."""
    if metadata:
        if annotation is not int or not all(isinstance(bound, _BOUNDS) for bound in metadata):
            return None
        limits = {type(bound).__name__.lower(): bound for bound in metadata}
        return Annotated[
            int, msgspec.Meta(**{name: getattr(bound, name) for name, bound in limits.items()})
        ]
    if annotation in _PLAIN or annotation == dict[str, str]:
        return annotation
    arguments = get_args(annotation)
    struct_type: Any = None
    match get_origin(annotation):
        case origin if origin is Annotated:
            struct_type = _struct_type(arguments[0], arguments[1:])
        case origin if origin is Literal and all(type(word) is str for word in arguments):
            struct_type = annotation
        case origin if origin in (Union, types.UnionType):
            found = [_struct_type(argument) for argument in arguments]
            others = [one for one in found if one is not types.NoneType]
            struct_type = (
                None if None in found or len(others) != 1 or len(found) == 1 else others[0] | None
            )
        case origin if origin is tuple and arguments[1:] == (...,):
            element = _struct_type(arguments[0])
            struct_type = None if element is None else tuple.__class_getitem__((element, ...))
    return struct_type


class _SharedPart:
    """Decodes one field with pydantic; equal texts give one value, which is safe because models are frozen."""

    __slots__ = ("_validate", "known")

    def __init__(self, field: FieldInfo) -> None:
        annotation = field.rebuild_annotation()
        is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        adapter: TypeAdapter[object] = TypeAdapter(annotation, config=None if is_model else _STRICT)
        self._validate = adapter.validator.validate_json
        self.known: dict[bytes, object] = {}

    def decode(self, text: bytes) -> object:
        """Return the value of a text that is not known yet."""
        value = self._validate(text)
        if len(text) <= _LONGEST_BYTES:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            self.known[text] = value
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The steps for documents that have the same fields."""

    present: set[str]
    """Shared by all of their models; it never changes."""
    defaults: Mapping[str, object]
    factories: tuple[tuple[str, FieldInfo], ...]
    shared: tuple[tuple[str, dict[bytes, object], Callable[[bytes], object]], ...]
    nested: tuple[tuple[str, Callable[[Any], BaseModel]], ...]


class _ModelBuilder(Generic[M]):
    """Makes models of their structs."""

    def __init__(
        self,
        model: type[M],
        shared: Mapping[str, _SharedPart],
        nested: Mapping[str, Callable[[Any], BaseModel]],
    ) -> None:
        self._model = model
        self._shared = shared
        self._nested = nested
        checks = model.__pydantic_decorators__.model_validators
        self._checks = tuple(getattr(model, name) for name in checks)
        self._layouts: dict[tuple[type, ...], _Layout] = {}

    def build(self, found: msgspec.Struct) -> M:
        """Return the model; its fields are in the order that pydantic gives them.

        Raises:
            ValueError: a field is missing, or not valid.

        """
        values, unknown = asdict(found), msgspec.UNSET
        key = (*map(type, values.values()),)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout(values)
        values.update(layout.defaults)
        for name, known, decode in layout.shared:
            text = bytes(values[name])
            value = known.get(text, unknown)  # another thread may clear it
            values[name] = decode(text) if value is unknown else value
        for name, build in layout.nested:
            values[name] = build(values[name])
        for name, field in layout.factories:
            values[name] = field.get_default(call_default_factory=True, validated_data=values)
        model = self._model
        made = model.__new__(model)
        _SET_VALUES(made, values)
        _SET_FIELDS(made, layout.present)
        _SET_EXTRA(made, None)
        _SET_PRIVATE(made, None)
        for check in self._checks:
            check(made)
        return made

    def _layout(self, values: Mapping[str, object]) -> _Layout:
        fields = self._model.model_fields
        missing = [name for name, value in values.items() if value is msgspec.UNSET]
        if required := [name for name in missing if fields[name].is_required()]:
            raise ValueError(f"{self._model.__name__} without {required[0]}")
        present = set(fields).difference(missing)
        factories = [name for name in missing if fields[name].default_factory]
        return _Layout(
            present=present,
            defaults={
                name: fields[name].get_default() for name in missing if name not in factories
            },
            factories=tuple((name, fields[name]) for name in factories),
            shared=tuple(
                (name, part.known, part.decode)
                for name, part in self._shared.items()
                if name in present
            ),
            nested=tuple(item for item in self._nested.items() if item[0] in present),
        )
