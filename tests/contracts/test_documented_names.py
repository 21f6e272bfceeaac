"""Every documented module and name can be imported where the documents have it, or is listed."""

import importlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from veloxquant import documented

HERE = Path(__file__).parent
NAMES: dict[str, list[str]] = tomllib.loads(
    (HERE / "documented_names.toml").read_text(encoding="utf-8")
)["names"]
MISSING = {
    name: entry["why"]
    for entry in tomllib.loads((HERE / "departures.toml").read_text(encoding="utf-8"))["missing"]
    for name in entry["names"]
}


def full(below: str) -> str:
    return f"veloxquant.{below}" if below else "veloxquant"


def below(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


@pytest.mark.parametrize("module", [m for m in NAMES if m not in MISSING])
def test_documented_names_are_where_the_documents_have_them(module: str) -> None:
    found = importlib.import_module(full(module))
    for name in NAMES[module]:
        here = hasattr(found, name)
        if below(module, name) in MISSING:
            assert not here, f"{below(module, name)} is here: take it off departures.toml"
        else:
            assert here, f"{full(module)} lacks {name}"


@pytest.mark.parametrize("module", [m for m in NAMES if m in MISSING])
def test_what_is_listed_as_missing_is_missing(module: str) -> None:
    try:
        importlib.import_module(full(module))
    except ModuleNotFoundError:
        return
    pytest.fail(f"{full(module)} is here: take it off departures.toml")


def test_nothing_else_is_listed_as_missing() -> None:
    known = {*NAMES, *(below(module, name) for module in NAMES for name in NAMES[module])}
    assert not set(MISSING) - known
    assert all(MISSING.values())


# ---- how paths without files work ------------------------------------------------------------


def test_the_table_of_homes_has_documented_paths_only_and_homes_that_exist() -> None:
    assert set(documented.HOMES) <= set(NAMES)
    for homes in documented.HOMES.values():
        for home in homes:
            assert importlib.util.find_spec(full(home)) is not None


def test_an_object_is_the_same_by_every_path() -> None:
    from veloxquant.artifacts.npy_store import NpyArtifactStore as again
    from veloxquant.cache.h2o_cache import H2OKVCache

    from veloxquant.artifacts import NpyArtifactStore
    from veloxquant.methods.h2o import H2OKVCache as home

    assert H2OKVCache is home
    assert NpyArtifactStore is again
    assert H2OKVCache.__module__ == "veloxquant.methods.h2o"


def test_a_path_behaves_like_a_module() -> None:
    import veloxquant.quantizers.h2o as functions

    assert functions is sys.modules["veloxquant.quantizers.h2o"]
    assert functions is importlib.import_module("veloxquant.quantizers").h2o
    assert "veloxquant.methods.functional.h2o" in (functions.__doc__ or "")
    assert {"H2OState", "h2o_update"} <= set(dir(functions))
    scope: dict[str, object] = {}
    exec("from veloxquant.cache.options import *", scope)
    assert "KIVIOptions" in scope
    assert "dataclass" not in scope
    with pytest.raises(ImportError, match="NoSuchCache"):
        exec("from veloxquant.cache.h2o_cache import NoSuchCache", scope)
    for unknown in ("veloxquant.cache.no_such_cache", "veloxquant.handlers.no_such"):
        with pytest.raises(ModuleNotFoundError, match="no_such"):
            importlib.import_module(unknown)


def test_importing_paths_loads_no_part_of_the_library() -> None:
    specs = [importlib.util.find_spec(full(path)) for path in documented.HOMES]
    paths = [
        spec.name
        for spec in specs
        if spec and spec.loader is documented.DocumentedPaths
        if spec.name.startswith(("veloxquant.cache.", "veloxquant.quantizers."))
    ]
    assert len(paths) > 50
    code = f"""
import importlib, sys, veloxquant
loaded = [m for m in sys.modules if m.startswith("veloxquant")]
assert sorted(loaded) == ["veloxquant", "veloxquant.documented"], loaded
for path in {paths}:
    importlib.import_module(path)
homes = [m for m in sys.modules if m.startswith(("mlx", "numpy", "veloxquant.methods"))]
assert not homes, homes
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=50)
