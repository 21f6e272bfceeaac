"""The cache helpers, importable by name."""

import importlib.util
import sys
from pathlib import Path


def _load(path: Path) -> None:
    """The folder itself must not be on the path: `tests/veloxquant` would hide the package."""
    if path.stem in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


_load(Path(__file__).parents[2] / "cache_lab.py")
