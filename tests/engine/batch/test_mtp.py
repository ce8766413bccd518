"""Guesses of multi-token prediction heads: what is guessed, that answers stay the same, and when a guess pays."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.batch.mtp import GuessPolicy
from engine.gauges import Gauges
from engine.jobs import SamplingParams
from models import model_files
from schemas.kv_cache import KvCache
from tests.support.engine_batches import CONFIG, PROMPTS, EvenClock, job, load, new_batch, run
from tests.support.mlx_models import module

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

ARCHS = ("mimo", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5")
PLAIN_S = 0.01


class Recorder:
    """A proposer that notes the number of tokens at each guess, and the guess."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self.guesses: list[tuple[int, list[int]]] = []

    def propose(self, sequence: Any, most: int) -> list[int]:
        found: list[int] = self._proposer.propose(sequence, most)
        if found:
            self.guesses.append((len(sequence.prompt) + len(sequence.outputs), found))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function that returns a loaded model with its head, and its folder."""
    made: dict[str, tuple[Any, Path]] = {}

    def find(arch: str) -> tuple[Any, Path]:
        if arch not in made:
            folder = tmp_path_factory.mktemp("mtp") / arch
            # The layers change the next token often enough that some guesses are wrong.
            layers = 3 if arch.startswith("qwen") else 2
            module("tests.support.mtp_models").make(
                folder, arch=arch, layers=layers, influence=0.25
            )
            made[arch] = with_head(folder), folder
        return made[arch]

    return find


def with_head(folder: Path) -> Any:
    config = CONFIG.model_copy(update={"model_dir": folder, "mtp_tokens": 1})
    return module("engine.model.mtp_head").add_head(
        load(folder), model_files.inspect_model(folder), config, Gauges(), is_stopping=lambda: False
    )


def without(loaded: Any) -> Any:
    return dataclasses.replace(loaded, mtp_head=None)


def eager(loaded: Any, folder: Path, tokens: int = 3, **changes: Any) -> Any:
    """Make a batch that guesses as many tokens as it may whenever it can."""
    batch = new_batch(loaded, folder, mtp_tokens=tokens, **changes)
    batch.clock = EvenClock()
    batch.executor.proposer = Recorder(batch.executor.proposer)
    batch.executor.decode_stage = batch.executor._new_decode_stage()
    return batch


SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.5, seed=4),
    SamplingParams(temperature=1, seed=5, top_p=0.8),
    SamplingParams(temperature=0, frequency_penalty=0.5),  # which waits for its tokens
]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arch", "sampling"),
    [("mimo", sampling) for sampling in SAMPLINGS]
    + [("glm4_moe", SAMPLINGS[0]), ("glm4_moe_lite", SAMPLINGS[1])]
    + [("qwen3_next", SAMPLINGS[0]), ("qwen3_5", SAMPLINGS[1])],
    ids=str,
)
def test_an_answer_is_the_same_with_a_head(
    make: Callable[[str], tuple[Any, Path]], arch: str, sampling: SamplingParams
) -> None:
    loaded, folder = make(arch)
    one = job(0, PROMPTS[3], sampling=sampling, max_tokens=60)
    wanted = run(new_batch(without(loaded), folder), one)
    batch = eager(loaded, folder)
    assert run(batch, dataclasses.replace(one, top_logprobs=1)) == wanted
    proposer = batch.executor.proposer
    if sampling.frequency_penalty:
        assert proposer.proposed_tokens == 0
        return
    assert proposer.proposed_tokens > proposer.accepted_tokens > 0
    assert batch.gauges.draft_tokens == proposer.proposed_tokens
    assert batch.gauges.draft_accepted_tokens == proposer.accepted_tokens


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_deepseek_of_61_layers_answers_the_same(tmp_path: Path) -> None:
    """mlx-lm drops `model.layers.61` and no other head, so a smaller model of this kind cannot be loaded."""
    folder = tmp_path / "deepseek"
    module("tests.support.mtp_models").make(folder, arch="deepseek_v3", layers=61, influence=0.02)
    loaded, one = with_head(folder), job(0, PROMPTS[3], max_tokens=40)
    wanted = run(new_batch(without(loaded), folder), one)
    batch = eager(loaded, folder)
    assert run(batch, one) == wanted
    assert batch.executor.proposer.accepted_tokens > 0


def guess_whole(loaded: Any, tokens: list[int], count: int) -> list[int]:
    """Guess what follows these tokens, with the head reading all of them at once."""
    mx = module("mlx.core")
    cache = module("mlx_lm.models.cache").KVCache()
    model, head = loaded.model, loaded.mtp_head
    hidden = model.model(mx.array([tokens[:-1]]), None)
    read, found = mx.array([tokens[1:]]), []
    for _ in range(count):
        hidden = head(hidden, model.model.embed_tokens(read), cache)[:, -1:]
        read = mx.argmax(getattr(model, "language_model", model).lm_head(hidden), axis=-1)
        found.append(read.item())
    return found


@pytest.mark.parametrize(
    "arch", [ARCHS[0], *(pytest.param(arch, marks=pytest.mark.ci) for arch in ARCHS[1:])]
)
def test_a_head_reads_all_tokens_with_the_states_before_them(
    make: Callable[[str], tuple[Any, Path]], arch: str
) -> None:
    """Piece by piece, with guesses taken back, it guesses as if it read the text at once."""
    loaded, folder = make(arch)
    batch = eager(loaded, folder)
    answer = run(batch, job(0, PROMPTS[2], max_tokens=60))[0]
    text, guesses = [*PROMPTS[2], *answer], batch.executor.proposer.guesses
    assert len(guesses) > 10
    assert max(len(guess) for _, guess in guesses) > 1
    proposer = batch.executor.proposer
    assert proposer.proposed_tokens > proposer.accepted_tokens > 0
    for count, guess in guesses:
        assert guess == guess_whole(loaded, text[:count], len(guess))


def test_guesses_pause_in_a_batch_and_resume_after_it(
    make: Callable[[str], tuple[Any, Path]],
) -> None:
    loaded, folder = make("mimo")
    jobs = [job(0, PROMPTS[3], max_tokens=60), job(1, PROMPTS[5], max_tokens=10)]
    wanted = run(new_batch(without(loaded), folder), *jobs)
    batch = eager(loaded, folder)
    assert run(batch, *jobs) == wanted
    proposer = batch.executor.proposer
    assert 0 < proposer.accepted_tokens < 60
    # What it left in the prefix cache is right. The head has not read the tokens that come from there.
    longer = [*PROMPTS[3], *wanted[0][:30]]
    assert run(batch, job(2, longer, max_tokens=30)) == {2: wanted[0][30:]}
    assert batch.executor.prefix.stats.hit_tokens > 0


def test_a_long_text_keeps_a_bounded_number_of_states(
    make: Callable[[str], tuple[Any, Path]],
) -> None:
    loaded, _ = make("mimo")
    states = module("engine.batch.hidden_states").HiddenStates(loaded.model)
    cache = module("mlx_lm.models.cache").make_prompt_cache(loaded.model)
    mx = module("mlx.core")
    for start in range(0, 1200, 300):
        states.keep_next(7, start)
        states(mx.array([[5] * 300]), cache)
    start, found = states.since(7, 0)
    assert (start, found.shape) == (900, (300, 64))
    assert states.since(7, 1100)[1].shape[0] == 100
    states.trim(50)
    assert states.since(7, 1100)[1].shape[0] == 50
    assert states.since(8, 0) is None
    states.keep_next(7, 1200)  # with a gap
    states(mx.array([[5]]), cache)
    assert states.since(7, 0)[0] == 1200
    assert not states.keep_next_prompt(8, 0)
    states.forget([7])
    assert states.since(7, 0) is None
    assert states.keep_next_prompt(8, 0)


@pytest.mark.ci
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_caches_take_guesses_back(tmp_path: Path, bits: Literal[4, 8]) -> None:
    folder = module("tests.support.mtp_models").make(tmp_path / "wide", hidden=128, influence=0.2)
    loaded, one = with_head(folder), job(0, PROMPTS[5], max_tokens=60)
    wanted = run(new_batch(without(loaded), folder, kv_cache=KvCache(bits=bits)), one)
    batch = eager(loaded, folder, kv_cache=KvCache(bits=bits))
    assert run(batch, one) == wanted
    assert batch.executor.proposer.accepted_tokens > 0


def spend(
    policy: GuessPolicy,
    share: float,
    cost_s: float,
    *,
    tokens: int = 10_000,
    rereads: bool = False,
) -> float:
    """Generate tokens of which the head guesses this share right; return the seconds that it takes.

    A model with states `rereads` the right ones after a wrong one, in the pass of the next token.
    """
    dice, spent, made, has_waited = random.Random(1), 0.0, 0, True
    while made < tokens:
        policy.begin_step()
        count = policy.choose(8)
        right = 0
        while right < count and dice.random() < share:
            right += 1
        seconds = PLAIN_S + count * cost_s
        passes = int(not count and has_waited)
        if rereads and right < count:
            seconds += PLAIN_S + (right + 1) * cost_s
            passes, made = passes + 1, made + 1
        policy.note_step(count, accepted=right, passes=passes)
        policy.times.record(seconds)
        has_waited = not count
        spent += seconds
        made += right + 1
    return spent / made * tokens


@pytest.mark.parametrize("rereads", [False, True])
@pytest.mark.parametrize("cost", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.6, 0.8, 1.0])
def test_guesses_cost_at_most_two_percent(share: float, cost: float, *, rereads: bool) -> None:
    spent = spend(GuessPolicy(count=3), share, cost * PLAIN_S, rereads=rereads)
    assert spent <= 10_000 * PLAIN_S / 0.98


def test_a_good_head_saves_time() -> None:
    """With passes as on a GPU, and as on a CPU; nothing is known at first."""
    assert spend(GuessPolicy(count=3), 0.8, 0.05 * PLAIN_S) < 10_000 * PLAIN_S / 2
    assert spend(GuessPolicy(count=3), 0.8, 0.3 * PLAIN_S) < 10_000 * PLAIN_S / 1.3
    assert spend(GuessPolicy(count=3), 0.8, 0.05 * PLAIN_S, rereads=True) < 10_000 * PLAIN_S / 1.8


def test_a_head_that_was_wrong_for_long_is_tried_again() -> None:
    policy = GuessPolicy(count=3)
    spend(policy, 0.0, 0.1 * PLAIN_S, tokens=3_000)
    assert not policy.pays
    assert spend(policy, 0.9, 0.1 * PLAIN_S) < 10_000 * PLAIN_S / 1.5
