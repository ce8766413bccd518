"""Small tasks in lm-evaluation-harness, through an engine's API and by mlx-lm's own evaluation; runs in .venv-lm-eval.

    python lm_eval_judge.py MODEL_DIR URL

The last line of the output is JSON: for "api" and "mlx-lm", the accuracy, log-likelihoods of choices, and texts.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before the imports, which read them: nothing is downloaded.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from mlx_lm.evaluate import MLXLM

QUESTIONS = (
    ("The capital of France is", ["Paris", "London", "Rome"], 0),
    ("The capital of Italy is", ["Berlin", "Rome", "Oslo"], 1),
    ("The opposite of hot is", ["cold", "blue", "table"], 0),
    ("Two plus two is", ["five", "four", "nine"], 1),
    ("The sky is", ["green", "blue", "loud"], 1),
    ("A cat says", ["moo", "woof", "meow"], 2),
    ("Water freezes to", ["ice", "sand", "wood"], 0),
    ("The days after Monday and Tuesday begin with", ["Sunday", "Friday", "Wednesday"], 2),
)


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Return a task that compares choices by their likelihood, and one that generates."""
    path = folder / "questions.jsonl"
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    texts = {
        "task": "texts",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    return [shared | choices, shared | texts]


def evaluate(model: Any, folder: Path) -> dict[str, Any]:
    """Return the figures of a model."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=tasks(folder), log_samples=True, bootstrap_iters=0
    )
    samples = {
        name: sorted(some, key=lambda one: one["doc_id"]) for name, some in found["samples"].items()
    }
    return {
        "accuracy": found["results"]["choices"]["acc,none"],
        "likelihoods": [[one[0] for one in s["filtered_resps"]] for s in samples["choices"]],
        "greedy": [[one[1] for one in s["filtered_resps"]] for s in samples["choices"]],
        "texts": [s["filtered_resps"][0] for s in samples["texts"]],
    }


def main(model_dir: str, url: str) -> None:
    """Evaluate both ways."""
    api = LocalCompletionsAPI(
        model="tiny", base_url=f"{url}/completions", tokenizer=model_dir, num_concurrent=2
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "api": evaluate(api, Path(folder)),
            "mlx-lm": evaluate(MLXLM(model_dir, use_chat_template=False), Path(folder)),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
