"""200 generated schemas x a model of random weights: what ends by itself parses and validates.

A random model is the hardest test: it does everything that is allowed, and nothing because it is likely.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import orjson
import pytest

from engine.grammar import json_schema, lark
from engine.grammar.interface import GrammarMatcher
from tests.support import engine_schemas as schemas
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(180)]
_COUNT, _BUDGET = 200, 280


@dataclass(slots=True, kw_only=True)
class Output:
    schema: Any
    matcher: GrammarMatcher
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False

    def text(self, loaded: Any) -> str:
        spelled = b"".join(loaded.codec.piece(token) for token in self.tokens)
        # What was cut off may end in the middle of a character.
        return spelled.decode(errors="strict" if self.is_over else "ignore")


def generate(loaded: Any, outputs: list[Output], budget: int, *, seed: int) -> None:
    """Sample all outputs in step, at temperature 1; finished ones leave the batch."""
    mx, logits_processors = module("mlx.core"), module("engine.batch.logits_processors")
    caches = module("mlx_lm.models.cache").make_prompt_cache(loaded.model)
    ends, key = set(loaded.codec.eos_ids), mx.random.key(seed)
    live, fed = list(outputs), mx.array([at % 400 + 20 for at in range(len(outputs))])
    for _ in range(budget):
        logits = loaded.model(fed[:, None], cache=caches)[:, -1, :]
        key, now = mx.random.split(key)
        allowed = logits_processors.apply_grammars(
            logits, [(at, one.matcher) for at, one in enumerate(live)]
        )
        fed = mx.random.categorical(allowed, key=now)
        for one, token in zip(live, fed.tolist(), strict=True):
            one.matcher.take(token)
            assert one.matcher.fault is None
            one.is_over = token in ends
            one.tokens += [] if one.is_over else [token]
        keep = [at for at, one in enumerate(live) if not one.is_over]
        if not keep:
            return
        live, fed = [live[at] for at in keep], fed[mx.array(keep)]
        for cache in caches:
            cache.keys, cache.values = cache.keys[mx.array(keep)], cache.values[mx.array(keep)]


@pytest.mark.ci
def test_every_complete_output_parses_and_validates(loaded: Any, grammars: Any) -> None:
    outputs: list[Output] = []
    for number in range(_COUNT):
        wanted = schemas.make(number)
        text = lark.json_grammar(
            json_schema.normalize_schema(wanted), loaded.codec.traits.specials, None
        )
        grammars.check(text)
        outputs.append(Output(schema=wanted, matcher=grammars.matcher(text)))
    generate(loaded, outputs, _BUDGET, seed=1)
    over = [output for output in outputs if output.is_over]
    print(f"{len(over)} of {_COUNT} ended by themselves within {_BUDGET} tokens")
    assert len(over) >= 0.88 * _COUNT
    for one in over:
        text = one.text(loaded)
        value = json.loads(text)
        assert orjson.loads(text) is not None
        jsonschema.Draft202012Validator(one.schema).validate(value)
    for output in outputs:
        if not output.is_over:
            with pytest.raises(json.JSONDecodeError):
                json.loads(output.text(loaded))
