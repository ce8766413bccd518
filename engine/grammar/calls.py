"""Writes grammars of tool calls in the syntax of a family of models. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from engine.grammar import lark
from engine.grammar.lark import FunctionSchema, ReasoningMarkers, Specials, ValueRules

Json: TypeAlias = Any


class Expression(str):
    """A regular expression between literal texts."""

    __slots__ = ()


# Control tokens match no regular expression.
_BODY = ("body: BODY?", "BODY: /(?s:.+)/")

Parts: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Syntax of calls: the texts around the name and the arguments, which are JSON or stand between tags."""

    section: Parts
    """Opens one or several calls; begins with the start marker of the format."""
    before: Parts
    """Between `section` and the name."""
    middle: Parts
    """Between the name and the arguments."""
    after: Parts
    """Behind the arguments."""
    section_end: Parts = ()
    between: Parts | None = None
    """Between two calls of a section; None if each call has its own."""
    tags: "TagSyntax | None" = None
    """Set if arguments stand between tags. Such calls are enforced on demand only: the model may have other habits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSyntax:
    """Syntax of arguments between tags."""

    before: str
    middle: str
    """Between the key and the value."""
    end: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class HarmonySyntax:
    """The channels of gpt-oss."""


Syntax: TypeAlias = CallSyntax | HarmonySyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """The functions that may be called, the syntax of calls, and the form of answers without calls."""

    syntax: Syntax
    functions: tuple[FunctionSchema, ...]
    must_call: bool
    is_parallel: bool
    instead: ValueRules | None = None
    """The form of an answer without calls; None allows any text, with or without calls behind it."""


def call_grammar(calling: CallRules, specials: Specials, thought: ReasoningMarkers | None) -> str:
    """Return the grammar of an answer that must or may call functions; `specials` are without the end tokens."""
    syntax = calling.syntax
    rules = [] if calling.instead is None else list(calling.instead.rules)
    client_grammar = "" if calling.instead is None else calling.instead.client_grammar
    if isinstance(syntax, HarmonySyntax):
        rules += _harmony_calls(calling, specials)
        return lark.join(specials, None, rules, client_grammar)
    start, section = syntax.section[0], _written(syntax.section, specials)
    body = f"{_written(syntax.before, specials)} function {_written(syntax.after, specials)}"
    more = ""
    if syntax.between is not None and calling.is_parallel:
        more = f"({_written(syntax.between, specials)} {body})*"
    end = _written(syntax.section_end, specials)
    again = f"(GAP? {section} calls)*" if calling.is_parallel else ""
    if calling.must_call:
        rules.append(f"answer: {section} calls {again} GAP?")
    elif calling.instead is not None:
        rules.append(f"answer: {section} calls {again} GAP? | value")
    elif start in specials:
        rules += [f"answer: free ({section} calls {again} GAP?)?"]
        rules += lark.free_text("free", [start], specials)
    else:
        # Lazy: the text ends with the first marker.
        rules += lark.free_text("free", [start], specials)
        kind, marked = lark.lazy_text(start, specials)
        rest = _written(syntax.section[1:], specials)
        rules += [
            f"answer: free | free_lead marked {rest} calls {again} GAP?",
            f"marked{kind}: {marked}",
        ]
    rules += [f"calls: {body} {more} {end}", r"GAP: /[\x20\n]{1,4}/"]
    rules += _functions(calling, specials)
    return lark.join(specials, thought, rules, client_grammar)


def _functions(calling: CallRules, specials: Specials) -> list[str]:
    names = " | ".join(f"call{at}" for at in range(len(calling.functions)))
    rules = [f"function: {names}"]
    tags = calling.syntax.tags if isinstance(calling.syntax, CallSyntax) else None
    for at, function in enumerate(calling.functions):
        name = lark.literal(function.name, specials)
        middle = ""
        if isinstance(calling.syntax, CallSyntax):
            middle = _written(calling.syntax.middle, specials)
        rules.append(f"call{at}: {name} {middle} args{at}")
        if tags is None:
            rules.append(f"args{at}: {lark.json_rule(function.parameters)}")
        else:
            rules += _tagged_arguments(at, function.parameters, tags, specials)
    return rules


def _tagged_arguments(at: int, schema: Json, tags: TagSyntax, specials: Specials) -> list[str]:
    """Return the rules of the arguments between tags, in the order of the schema."""
    named = schema.get("properties") if isinstance(schema, Mapping) else None
    kind, text = lark.lazy_text(tags.end, specials)
    before, after = lark.literal(tags.before, specials), lark.literal(tags.after, specials)
    if not isinstance(named, Mapping):  # any arguments
        is_closed = schema is False or schema.get("additionalProperties") is False
        middle = lark.literal(tags.middle, specials)
        any_argument = (
            "" if is_closed else f'({before} /[^<>\\s"]{{1,64}}/ {middle} text{at} {after})*'
        )
        return [f"args{at}: {any_argument}", *([] if is_closed else [f"text{at}{kind}: {text}"])]
    required = schema.get("required", ())
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    order, rules = [], []
    for number, (key, part) in enumerate(named.items()):
        rule = f"arg{at}_{number}"
        order.append(rule if key in required else f"{rule}?")
        opening = f"{before} {lark.literal(key + tags.middle, specials)}"
        rules.append(f"{rule}: {opening} value{at}_{number} {after}")
        choices = part.get("enum") if isinstance(part, Mapping) else None
        end = lark.literal(tags.end, specials)
        if choices and all(isinstance(choice, str) for choice in choices):
            texts = " | ".join(json.dumps(choice) for choice in choices)
            rules.append(f"value{at}_{number}: ({texts}) {end}")
        elif _is_text(part):
            rules.append(f"value{at}_{number}{kind}: {text}")
        else:
            whole = {**part, **shared} if isinstance(part, Mapping) else part
            rules.append(f"value{at}_{number}: {lark.json_rule(whole)} {end}")
    return [f"args{at}: {' '.join(order)}", *rules]


def _is_text(schema: Json) -> bool:
    """Return whether a value may be text, which is written without quotes."""
    if not isinstance(schema, Mapping):
        return schema is not False
    kinds = schema.get("type")
    if kinds is None:
        parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        is_other = schema.keys() & {"$ref", "properties", "items", "enum", "const"}
        return any(map(_is_text, parts)) if parts else not is_other
    return kinds == "string" or "string" in kinds


def harmony_answer(value: ValueRules, specials: Specials) -> str:
    """Return the grammar of an answer that is a value, in gpt-oss's final channel."""
    rules = [f"answer: {_harmony_start(specials)} {_final(specials)} value", *value.rules]
    return lark.join(specials, None, [*rules, *_BODY], value.client_grammar)


def _harmony_start(specials: Specials) -> str:
    """Return the messages before the last one: reasoning, and text that announces calls."""
    next_message = lark.literal("<|end|><|start|>assistant", specials)
    opening = lark.literal("<|channel|>", specials)
    message = lark.literal("<|message|>", specials)
    return f'({opening} ("analysis" | "commentary") {message} body {next_message})*'


def _final(specials: Specials) -> str:
    return lark.literal("<|channel|>final<|message|>", specials)


def _harmony_calls(calling: CallRules, specials: Specials) -> list[str]:
    channel = lark.literal("<|channel|>", specials)
    message = lark.literal("<|message|>", specials)
    kind = f'" "? ({lark.literal("<|constrain|>", specials)}? "json")?'
    end = f"{lark.literal('<|call|>', specials)}?" if "<|call|>" in specials else ""
    rules = [f"answer: {_harmony_start(specials)} last"]
    body = "value" if calling.instead is not None else "body"
    rules.append("last: call" + ("" if calling.must_call else f" | {_final(specials)} {body}"))
    heads = []
    for at, function in enumerate(calling.functions):
        name = json.dumps(function.name)
        heads.append(f"call{at}")
        rules.append(
            f'call{at}: ({channel} "commentary to=functions." {name} {kind} {message}'
            f' | " to=functions." {name} {channel} "commentary" {kind} {message}) args{at} {end}'
        )
        rules.append(f"args{at}: {lark.json_rule(function.parameters)}")
    rules.append(f"call: {' | '.join(heads)}")
    return [*rules, *_BODY]


def _written(parts: Parts, specials: Specials) -> str:
    return " ".join(
        f"/{part}/" if isinstance(part, Expression) else lark.literal(part, specials)
        for part in parts
        if part
    )
