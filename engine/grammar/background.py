"""Compiles the grammars of jobs beside the worker thread, and holds them while their jobs run.

Rank 0 compiles a grammar before it makes a job of it, so nothing is left to do there. The other ranks of a group get
the job with a step: they compile while its prompt is read, and not between two tokens of all answers.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.grammar.interface import CompiledGrammar, GrammarCompiler


class BackgroundGrammars:
    """The grammars of jobs that run, by job. Worker thread only."""

    def __init__(self, grammars: GrammarCompiler | None) -> None:
        """`grammars` is None for a model whose tokenizer does not support them."""
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._held: dict[int, CompiledGrammar | Future[CompiledGrammar]] = {}

    def start(self, job_id: int, grammar: str | None) -> None:
        """Begin to compile the grammar of a job, unless it is in memory."""
        if grammar is None or self._grammars is None:
            return
        compiled_grammar = self._grammars.find(grammar)
        self._held[job_id] = (
            self._thread.submit(self._grammars.check, grammar)
            if compiled_grammar is None
            else compiled_grammar
        )

    def finish(self, job_id: int) -> None:
        """Wait until the grammar of a job is compiled; at once if it has none.

        Raises:
            GrammarError: this rank cannot compile what rank 0 has compiled.

        """
        held = self._held.get(job_id)
        if isinstance(held, Future):
            self._held[job_id] = held.result()

    def drop(self, job_ids: Iterable[int]) -> None:
        """Hold the grammars of these jobs no longer."""
        for job_id in job_ids:
            held = self._held.pop(job_id, None)
            if isinstance(held, Future):
                held.cancel()
