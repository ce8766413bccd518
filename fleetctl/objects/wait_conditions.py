"""The goals of `fleetctl wait --for`, and whether an object has reached them. Pure."""

import re
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import click

from fleetctl.objects import jsonpath
from fleetctl.objects.jsonpath import FieldPath
from store import object_trees
from store.object_trees import Tree

_FORMS = "condition=Available, condition=Available=False, jsonpath='{.status.readyReplicas}'=2, create, or delete"
# Braces are optional, as in kubectl: without them the first "=" outside of brackets ends the path.
_JSONPATH = re.compile(
    r"jsonpath=(\{.*\}|\.?[A-Za-z_](?:[^=\[\]{}]|\[[^\]]*\])*)(?:=(.*))?", re.DOTALL
)
_TRUTHS = {"true": "True", "false": "False", "unknown": "Unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionGoal:
    """A condition with this truth, observed for the current generation."""

    type: str
    truth: str = "True"

    @property
    def text(self) -> str:
        return f"condition {self.type}={self.truth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldGoal:
    """A path that finds this value; without a value, any value."""

    path: FieldPath
    path_text: str
    value: str | None

    @property
    def text(self) -> str:
        return self.path_text if self.value is None else f"{self.path_text} to be {self.value!r}"


@dataclass(frozen=True, slots=True)
class CreatedGoal:
    """The object exists."""

    text: str = "creation"


@dataclass(frozen=True, slots=True)
class DeletedGoal:
    """The object is gone."""

    text: str = "deletion"


Goal: TypeAlias = ConditionGoal | FieldGoal | CreatedGoal | DeletedGoal


def parse(text: str) -> Goal:
    """Return the goal of a `--for` value.

    Raises:
        click.UsageError: the value is not of a known form.
        FleetctlError: its JSONPath is invalid.

    """
    if text == "delete":
        return DeletedGoal()
    if text == "create":
        return CreatedGoal()
    if found := re.fullmatch(
        r"condition=([A-Za-z]+)(?:=(true|false|unknown))?", text, re.IGNORECASE
    ):
        return ConditionGoal(type=found[1], truth=_TRUTHS[(found[2] or "true").lower()])
    if found := _JSONPATH.fullmatch(text):
        value = found[2]
        if value is not None and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        if value == "":
            raise click.UsageError(
                f"--for={text}: the value after '=' is missing; remove '=' to wait for any value"
            )
        return FieldGoal(path=jsonpath.parse_path(found[1]), path_text=found[1], value=value)
    raise click.UsageError(f"--for={text}: write {_FORMS}")


def is_met(goal: Goal, tree: Tree | None) -> bool:
    """Return whether the object has reached the goal; None is an object that does not exist."""
    match goal:
        case DeletedGoal():
            return tree is None
        case CreatedGoal():
            return tree is not None
        case ConditionGoal():
            return tree is not None and _is_condition_met(goal, tree)
        case FieldGoal():
            return tree is not None and _is_field_met(goal, tree)
        case _:
            assert_never(goal)


def met_text(goal: Goal) -> str:
    """Return the text for an object that reached the goal."""
    match goal:
        case DeletedGoal():
            return "deleted"
        case CreatedGoal():
            return "created"
        case ConditionGoal() | FieldGoal():
            return "condition met"
        case _:
            assert_never(goal)


def state_text(goal: Goal, tree: Tree | None) -> str:
    """Return the object's current state, as the end of a sentence."""
    if tree is None:
        return "; it does not exist"
    match goal:
        case DeletedGoal() | CreatedGoal():
            return ""
        case FieldGoal():
            found = [jsonpath.format_value(value) for value in goal.path.find(tree)]
            return (
                f"; it is {', '.join(map(repr, found))}" if found else "; the field does not exist"
            )
        case ConditionGoal():
            return _condition_state(goal, tree)
        case _:
            assert_never(goal)


def reason(goal: Goal, tree: Tree | None) -> str:
    """Return the reason of the condition that the goal is about; empty for other goals."""
    found = _find_condition(goal, tree) if isinstance(goal, ConditionGoal) and tree else None
    return "" if found is None else str(found.get("reason", ""))


def _is_condition_met(goal: ConditionGoal, tree: Tree) -> bool:
    condition = _find_condition(goal, tree)
    if condition is None:
        return False
    # A status of an older generation does not count.
    is_current = condition.get("observedGeneration", 0) >= tree["metadata"].get("generation", 0)
    return is_current and condition.get("status") == goal.truth


def _find_condition(goal: ConditionGoal, tree: Tree) -> Tree | None:
    """Return the condition of the type; as in kubectl, its case does not matter."""
    type_name = goal.type.lower()
    every = object_trees.conditions_of(tree)
    return next((one for one in every if str(one.get("type")).lower() == type_name), None)


def _is_field_met(goal: FieldGoal, tree: Tree) -> bool:
    found = goal.path.find(tree)
    if goal.value is None:
        return bool(found)
    return bool(found) and all(jsonpath.format_value(value) == goal.value for value in found)


def _condition_state(goal: ConditionGoal, tree: Tree) -> str:
    condition = _find_condition(goal, tree)
    if condition is not None:
        cause = f"{condition.get('reason', '')}: {condition.get('message', '')}".removesuffix(": ")
        is_old = condition.get("observedGeneration", 0) < tree["metadata"].get("generation", 0)
        age = ", of an older generation" if is_old else ""
        return f"; it is {condition.get('status')} ({cause}{age})"
    known = ", ".join(str(one.get("type")) for one in object_trees.conditions_of(tree))
    return f"; it has no such condition, only {known}" if known else ""
