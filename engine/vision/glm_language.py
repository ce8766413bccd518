"""The language models of GLM-4.1V and GLM-4.5V, which mlx-lm has under other names. Worker thread only."""

import importlib
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from mlx.nn.layers.base import Module
from mlx_lm import utils
from typing_extensions import override

Array: TypeAlias = Any  # mlx ships no types

_MODULES: Final = {"glm4v": "glm4", "glm4v_moe": "glm4_moe"}
# Of mlx-vlm's config, where a published config.json says nothing.
_USUAL: Final = {"attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0}


def language_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the classes that build the language model of a config: mlx-lm's own, or GLM's in a model of its name."""
    if config["model_type"] not in _MODULES:
        model_class, args_class = utils._get_classes(config)  # noqa: SLF001 - the default of `load_model`
        if config["model_type"] == "qwen3_next":
            model_class = _without_head(model_class)
        return model_class, args_class
    library = importlib.import_module(f"mlx_lm.models.{_MODULES[config['model_type']]}")

    class Arguments:
        """The config of mlx-lm's model, made of the text's part of a config.json."""

        @classmethod
        def from_dict(cls, fields: Mapping[str, Any]) -> Any:
            """Return mlx-lm's config."""
            text = fields["text_config"]
            rope = text.get("rope_parameters") or {}
            width = {"head_dim": text["hidden_size"] // text["num_attention_heads"]}
            fixed = {"rope_scaling": None, "tie_word_embeddings": False}
            return library.ModelArgs.from_dict({**_USUAL, **width, **rope, **text, **fixed})

    class Model(Module):
        """The model of mlx-lm as the language model of one that sees."""

        def __init__(self, arguments: Any) -> None:
            super().__init__()  # type: ignore[no-untyped-call] # mlx ships few types
            self.language_model = library.Model(arguments)

        @property
        def layers(self) -> Any:
            """Return the layers that have caches."""
            return self.language_model.layers

        @override
        def __call__(self, tokens: Array, cache: Any = None) -> Array:
            """Return the logits of each token."""
            return self.language_model(tokens, cache=cache)

        def sanitize(self, weights: dict[str, Array]) -> dict[str, Array]:
            """Return the weights of the language model by the names of this model."""
            inner = {
                _inner_name(name): array
                for name, array in weights.items()
                if "visual" not in name and not name.startswith("vision_tower.")
            }
            if hasattr(self.language_model, "sanitize"):
                inner = self.language_model.sanitize(inner)
            return {f"language_model.{name}": array for name, array in inner.items()}

    return Model, Arguments


def _without_head(model_class: Any) -> Any:
    """Return the class, which drops the tensors of a head (engine/model/mtp_head.py) of converted weights, too."""

    def sanitize(model: Any, weights: dict[str, Array]) -> dict[str, Array]:
        rest = {name: array for name, array in weights.items() if not name.startswith("mtp.")}
        dropped: dict[str, Array] = model_class.sanitize(model, rest)
        return dropped

    members = {"sanitize": sanitize, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)


def _inner_name(name: str) -> str:
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")
