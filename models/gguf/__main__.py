"""`python -m models.gguf`: looks into a GGUF file, or converts it, within limits of memory and time."""

import os
import threading
from typing import BinaryIO

from machinery import limited_child
from models.gguf.child import LIMITS, Answer, Question
from models.gguf.file_reader import GgufRefusedError


def _answer(raw: bytes, output: BinaryIO) -> None:
    from models.gguf import conversion  # noqa: PLC0415 - after the environment is set

    question = Question.model_validate_json(raw)
    try:
        if question.into is None:
            answer = Answer(result_bytes=conversion.result_bytes(question.source))
        else:
            conversion.convert(question.source, question.into)
            answer = Answer()
    except GgufRefusedError as error:
        answer = Answer(problem=str(error))
    except OSError as error:
        answer = Answer(problem=f"{error.filename or question.into}: {error.strerror or error}")
    output.write(answer.model_dump_json().encode())


def _end_with(parent: int) -> None:
    """End the process when its parent has ended: a repeated import writes the same folder."""
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(0.1)
    os._exit(1)


if __name__ == "__main__":
    # Each thread of OpenBLAS takes address space, and none is needed.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    limited_child.serve(_answer, LIMITS)
