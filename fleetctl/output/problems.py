"""Problems of a fleet as text: what is wrong, why, and what to do."""

from fleetctl.cli import terminal
from insight.root_cause import Problem

_ROLES: dict[str, terminal.Role] = {"bad": "bad", "warning": "warn"}


def problem_text(problem: Problem, *, is_described: bool = False) -> str:
    """Return a problem in a few lines, the first one in colour; `is_described`: beside its object's description."""
    lines = [problem.cause, problem.remedy]
    is_more = not (is_described and problem.command.startswith("fleetctl describe "))
    if is_more and f"`{problem.command}`" not in problem.remedy:
        lines.append(problem.command)
    title = terminal.paint(f"! {problem.title}", _ROLES[problem.tone])
    return "\n".join((title, *(f"    {line}" for line in lines if line)))
