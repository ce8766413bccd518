"""A rank that gets a job with a grammar compiles it beside the thread that computes, and holds it while the job runs."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from engine.grammar import llguidance_backend
from engine.grammar.background import BackgroundGrammars
from engine.grammar.llguidance_backend import LlgCompiler, LlgGrammar
from engine.jobs import Job
from tests.support.engine_batches import job, new_batch, run

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(120)]

DIGITS = 'start: "a" /[0-9]{3}/\n'


class WatchedCompiler(LlgCompiler):
    """The real compiler, which notes the threads that compile and can be held up."""

    threads: list[threading.Thread]
    may_go: threading.Event

    @override
    def _compile(self, tokenizer: Any, grammar: str) -> Any:
        self.may_go.wait(30)
        self.threads.append(threading.current_thread())
        return LlgCompiler._compile(self, tokenizer, grammar)


@pytest.fixture
def compiler(loaded: Any) -> WatchedCompiler:
    made = WatchedCompiler(serialized=loaded.codec.serialized, eos_ids=loaded.codec.eos_ids)
    made.threads, made.may_go = [], threading.Event()
    made.prepare()
    return made


def constrained(number: int, grammar: str = DIGITS) -> Job:
    return job(number, [20, 21, 22], grammar=grammar, max_tokens=8)


def test_a_job_that_another_rank_made_compiles_beside_the_worker(
    loaded: Any, tiny: Path, compiler: WatchedCompiler
) -> None:
    batch = new_batch(loaded, tiny)
    executor = batch.executor
    executor.grammars = compiler
    executor.compiling = BackgroundGrammars(compiler)
    plain = job(1, [30, 31, 32], max_tokens=4)
    executor.join([constrained(2)])  # as a follower does with a step of rank 0: returns at once
    assert compiler.threads == []
    executor.leave([2])
    compiler.may_go.set()
    found = run(batch, constrained(3), plain)
    detokenizer = loaded.codec.detokenizer()
    for token in found[3]:
        if token not in loaded.codec.eos_ids:
            detokenizer.add_token(token)
    detokenizer.finalize()
    assert re.fullmatch("a[0-9]{3}", detokenizer.text)
    assert len(found[1]) == 4
    assert compiler.threads
    assert threading.current_thread() not in compiler.threads


def test_a_grammar_lives_as_long_as_its_job(loaded: Any, compiler: WatchedCompiler) -> None:
    compiler.may_go.set()
    background = BackgroundGrammars(compiler)
    background.start(1, DIGITS)
    background.finish(1)
    for at in range(llguidance_backend._CACHED_GRAMMARS + 1):  # others push it out of the cache
        compiler.check(f'start: "{at}"\n')
    assert isinstance(compiler.find(DIGITS), LlgGrammar)
    compiled = len(compiler.threads)
    compiler.matcher(DIGITS)
    background.start(2, DIGITS)
    background.finish(2)
    assert len(compiler.threads) == compiled


def test_jobs_without_a_grammar_wait_for_nothing(loaded: Any) -> None:
    for background in (BackgroundGrammars(None), BackgroundGrammars(loaded.grammars)):
        background.start(1, None)
        background.finish(1)
        background.drop([1, 2])
