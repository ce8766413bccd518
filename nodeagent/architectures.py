"""Does the installed mlx-lm know this architecture? Looks at its files; must not import it."""

import importlib.metadata
import importlib.util
from pathlib import Path


def complaint(module: str) -> str:
    """Return why the engine could not build a model of this architecture; "" if it can."""
    spec = importlib.util.find_spec("mlx_lm")  # finds, does not import
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        return "mlx-lm is not installed on this node"
    is_name = "/" not in module and len(module) < 100
    if is_name and any((Path(f) / "models" / f"{module}.py").is_file() for f in folders):
        return ""
    version = importlib.metadata.version("mlx-lm")
    return (
        f"mlx-lm {version} on this node has no architecture {module}; a newer version may have it"
    )
