"""Async tests that run in a scene of their own, mostly in virtual time."""

import inspect
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any

Test = Callable[..., Coroutine[Any, Any, None]]


def scene_test(test: Test, play: Callable[..., None], *fixtures: str) -> Callable[..., None]:
    """Return a plain test: `play` gets the async one, which wants a scene first, and these fixtures."""

    @wraps(test)
    def run(**options: Any) -> None:
        given = {name: options.pop(name) for name in fixtures}
        play(partial(test, **options), **given)

    _, *others = inspect.signature(test).parameters.values()
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures]
    parameters = [*own, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in others)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
