"""Writes references.json: what transformers computes for the tiny encoders of tests/support/engine_encoders.py.

Run it from the repository's root in an environment of its own with torch, transformers 5.23 or newer and tokenizers:
`python -m tests.engine.encoder.make_references`.
"""

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.engine_encoders import CONFIGS, PAIRS, TEXTS, make_encoder


def main() -> None:
    """Write the file beside this one."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    references: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as parent, torch.no_grad():
        for family in CONFIGS:
            folder = make_encoder(Path(parent) / family, family)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            model = transformers.AutoModel.from_pretrained(folder).eval()
            # One text at a time: no padding, whose treatment is what is tested.
            references[family] = [
                model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).tolist()
                for text in TEXTS
            ]
            if family == "nomic_bert":
                continue
            folder = make_encoder(Path(parent) / f"{family}-score", family, is_classifier=True)
            scorer = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
            references[f"{family}-score"] = [
                float(scorer(**tokenizer(*pair, return_tensors="pt")).logits[0, 0])
                for pair in PAIRS
            ]
    path = Path(__file__).with_name("references.json")
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(values)}" for name, values in references.items()
    )
    path.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
