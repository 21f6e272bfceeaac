"""Documented import paths whose code lives elsewhere.

`from veloxquant.cache.h2o_cache import H2OKVCache` works although the class is defined in
`veloxquant.methods.h2o`. A finder at the end of Python's list answers for the paths of the table
below and for nothing else; the module that it makes is empty, and looks a name up at home when
somebody asks for it. So a path costs nothing until it is used, and `import veloxquant` loads no
part of the library.

A class has one identity, whatever the path: `isinstance`, pickles and tracebacks know it by its
home. Type checkers read files, and there is none for these paths: code that is to be checked
imports from the home, or from `veloxquant` itself.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "veloxquant"

_CACHES = """
    a2ats adakv age_tiered amc anchorkv cachegen cam chunkkv curdkv gear h2o keyformer kitty kivi
    knorm kvquant kvtc kvzip minicache morphkv nestedkv nsnquant palu polar pyramidkv qfilters qjl
    rocketkv skvq snapkv spectral squeeze streaming_llm svdq tova turboquant_rvq vecinfer xkv xquant
    zipcache
"""
_FUNCTIONS = """
    cam chunkkv curdkv h2o keyformer knorm kvzip morphkv nestedkv pyramidkv qfilters snapkv squeeze
    streaming_llm tova
"""
_PARTS = {
    "artifacts": "memory_store npy_store",
    "handlers": """
        bit_pack_handler normalization outlier_split polar_handler qjl_residual_handler
        rotation_handler scalar_quant_handler value_quant_handler
    """,
    "observers": "base distortion key_norm latency memory",
    "outlier": "detector",
    "preconditioners": "base jl_sketch rotation",
    "transforms": "polar",
}
"""Modules that the documents have in several files."""

HOMES: dict[str, tuple[str, ...]] = {
    **{f"cache.{name}_cache": (f"methods.{name}",) for name in _CACHES.split()},
    "cache.sink_cache": ("methods.kivi_sink",),
    "cache.turboquant_cache": ("methods.turboquant_mse",),
    "cache.chunkkv_coordinator": ("cache.board_coordinators",),
    "cache.squeeze_coordinator": ("cache.board_coordinators",),
    "cache.minicache_coordinator": ("cache.group_coordinators",),
    "cache.xkv_coordinator": ("cache.group_coordinators",),
    "cache.xquant_coordinator": ("cache.group_coordinators",),
    "cache.options": ("config.options",),
    **{f"quantizers.{name}": (f"methods.functional.{name}",) for name in _FUNCTIONS.split()},
    "quantizers.qfilters_calibration": ("cache.qfilters_calibration",),
    **{f"{home}.{part}": (home,) for home, parts in _PARTS.items() for part in parts.split()},
    "artifacts.base": ("core.abstractions",),
    "handlers.base": ("core.abstractions", "core.context"),
    "transforms.base": ("core.abstractions",),
}
"""Documented path below the package: modules that have its names.

Where a file of that path exists too, it has the other names, and asks `name_at_home` for these.
"""


def name_at_home(path: str, name: str) -> Any:
    """The object that a documented path (`veloxquant.cache.h2o_cache`) has under a name.

    Raises:
        AttributeError: when no home of the path has it.
    """
    # Python itself asks modules for names with underscores, such as `__path__`.
    if not name.startswith("_"):
        for home in HOMES.get(path.removeprefix(f"{PACKAGE}."), ()):
            module = import_module(f"{PACKAGE}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {path!r} has no attribute {name!r}")


def names_at_home(path: str) -> list[str]:
    """Names that a documented path has: what its homes define."""
    found: set[str] = set()
    for home in HOMES.get(path.removeprefix(f"{PACKAGE}."), ()):
        module = import_module(f"{PACKAGE}.{home}")
        listed = getattr(module, "__all__", None)
        found.update(listed or (n for n in vars(module) if _is_defined_there(module, n)))
    return sorted(found)


def _is_defined_there(module: ModuleType, name: str) -> bool:
    if name.startswith("_"):
        return False
    return name.isupper() or getattr(vars(module)[name], "__module__", None) == module.__name__


class _Elsewhere(ModuleType):
    """A module of a documented path: its names come from home, one by one, when asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return names_at_home(self.__name__)
        value = name_at_home(self.__name__, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names_at_home(self.__name__)})


class DocumentedPaths:
    """Finder and loader of the documented paths that no file has."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a documented path is; None for every other module."""
        del path, target
        package, _, below = name.partition(".")
        homes = HOMES.get(below) if package == PACKAGE else None
        if homes is None:
            return None
        origin = ", ".join(f"{PACKAGE}.{home}" for home in homes)
        return ModuleSpec(name, DocumentedPaths, origin=origin)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """An empty module that says where its names live."""
        return _Elsewhere(spec.name, f"Documented path of what is in {spec.origin}.")

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing to run: names come when they are asked for."""


def install() -> None:
    """Let Python find the documented paths; once."""
    if DocumentedPaths not in sys.meta_path:
        sys.meta_path.append(DocumentedPaths)  # type: ignore[arg-type]
