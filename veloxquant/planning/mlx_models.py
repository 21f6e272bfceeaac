"""Which model types the installed mlx-lm can load, read from its files and never imported.

Importing mlx-lm takes two seconds and loads transformers; looking at its folder takes milliseconds.
"""

import ast
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any


@functools.cache
def mlx_lm_folder() -> Path | None:
    """Folder of the installed mlx-lm, or None."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def _renames() -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Its two tables of other names: by model type, and by model type and architecture."""
    folder = mlx_lm_folder()
    found: dict[str, Any] = {}
    if folder is not None:
        try:
            tree = ast.parse((folder / "utils.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            tree = ast.Module(body=[], type_ignores=[])
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name in ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"):
                    found[name] = ast.literal_eval(node.value)
    return found.get("MODEL_REMAPPING", {}), found.get("MODEL_ARCHITECTURE_REMAPPING", {})


def module_of(config: dict[str, Any]) -> str:
    """Name of the mlx-lm module that loads a model with this `config.json`."""
    kind = str(config.get("model_type", ""))
    by_type, by_architecture = _renames()
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if found := by_architecture.get((kind, str(name))):
            return found
    return by_type.get(kind, kind)


@functools.cache
def _defines_model(module: str) -> bool:
    folder = mlx_lm_folder()
    if folder is None or not re.fullmatch(r"[\w-]+", module):
        return False
    try:
        text = (folder / "models" / f"{module}.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return "\nclass Model(" in text or "import Model" in text


CODE_KEYS = ("model_file", "auto_map")
"""Entries by which a model asks for its own Python code to be run."""


def refusal(config: dict[str, Any]) -> str:
    """Why the installed mlx-lm cannot load such a model; empty when it can."""
    if mlx_lm_folder() is None:
        return "mlx-lm is not installed"
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        return "config.json names no model_type"
    if not _defines_model(module_of(config)):
        return f"model type {kind!r} is unknown to the installed mlx-lm"
    return ""
