"""Stores for matrices, codebooks and calibrations that are worth keeping.

Matrices are kept in fp16 as documented. A matrix that is generated is rounded in the same way, and
a rotation is made orthogonal again after rounding, so that a run with a warm store, one with a
cold store and one without any give the same numbers.
"""

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.core.abstractions import ArtifactStore
from veloxquant.core.exceptions import ArtifactNotFoundError, CodebookDimensionMismatch
from veloxquant.core.whole_files import write_file
from veloxquant.math.rotation import make_jl_matrix, make_rotation_matrix

__path__ = []  # the documented submodules are names of this one: see veloxquant.documented
__all__ = [
    "ArtifactStore",
    "Calibration",
    "InMemoryArtifactStore",
    "NpyArtifactStore",
    "codebook",
    "jl_matrix",
    "rotation_matrix",
]

CALIBRATION_VERSION = 1
_META = "calibration"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
_FIELDS = {
    "rotation": ("d", "seed"),
    "codebook": ("distribution", "b", "d"),
    "jl": ("d", "m", "seed"),
}


def _name(kind: str, given: Mapping[str, Any]) -> str:
    """The file name of an artifact without its ending.

    Raises:
        ValueError: for an unknown kind, a missing or unknown parameter, or a name that is not safe.
    """
    names = _FIELDS.get(kind)
    if names is None:
        raise ValueError(f"artifact type {kind!r}; known: {', '.join(_FIELDS)}")
    if set(given) != set(names):
        raise ValueError(f"a {kind} is named by {', '.join(names)}; got {', '.join(given)}")
    parts = [kind]
    for name in names:
        value = given[name]
        if name == "distribution":
            parts.append(_safe(value, "distribution"))
        elif not isinstance(value, int | np.integer) or isinstance(value, bool):
            raise ValueError(f"{kind} {name}={value!r}; give an integer")
        else:
            parts.append(f"{name}{int(value)}")
    return "_".join(parts)


def _safe(text: Any, what: str) -> str:
    """`text`, when it is a plain file name.

    Raises:
        ValueError: when it is not.
    """
    if not isinstance(text, str) or not _NAME.fullmatch(text) or ".." in text:
        raise ValueError(
            f"{what} {text!r} cannot name a file; use letters, digits, '_', '-' and '.'"
        )
    return text


def _array(value: Any, dtype: Any) -> np.ndarray:
    """A numpy copy of an array of either library."""
    if isinstance(value, mx.array):
        value = np.array(value.astype(mx.float32))
    return np.asarray(value).astype(dtype)


def _checked(kind: str, value: Any, given: Mapping[str, Any]) -> np.ndarray:
    """An artifact as it is kept.

    Raises:
        ValueError: when a matrix has another shape than its name says.
        CodebookDimensionMismatch: when a codebook has.
    """
    array = _array(value, np.float32 if kind == "codebook" else np.float16)
    d = int(given["d"])
    wanted = {
        "rotation": lambda: (d, d),
        "jl": lambda: (int(given["m"]), d),
        "codebook": lambda: (1 << int(given["b"]),),
    }[kind]()
    if array.shape != wanted:
        error = CodebookDimensionMismatch if kind == "codebook" else ValueError
        raise error(f"{_name(kind, given)} has shape {array.shape}; it should be {wanted}")
    return array


@dataclass
class Calibration:
    """What the fitter of one method found for one model.

    Attributes:
        layers: arrays of each compressed layer, by name.
        shared: arrays that are the same for all layers.
        meta: what it was made from; values that JSON can hold.
    """

    layers: list[dict[str, Any]]
    shared: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


class _Store(ArtifactStore):
    """The documented methods over two: read one array by name, write one."""

    def _read(self, name: str) -> np.ndarray | None:
        raise NotImplementedError

    def _write(self, name: str, array: np.ndarray) -> None:
        raise NotImplementedError

    def _load(self, kind: str, **given: Any) -> mx.array:
        name = _name(kind, given)
        array = self._read(name)
        if array is None:
            raise ArtifactNotFoundError(
                f"{name} is not in {self!r}; save it first, or run `vq precompute`"
            )
        return mx.array(_checked(kind, array, given))

    def _save(self, value: Any, kind: str, **given: Any) -> None:
        name = _name(kind, given)
        self._write(name, _checked(kind, value, given))

    def load_rotation_matrix(self, d: int, seed: int) -> mx.array:
        """Rotation matrix (d, d) fp16.

        Raises:
            ArtifactNotFoundError: when it was never saved.
        """
        return self._load("rotation", d=d, seed=seed)

    def save_rotation_matrix(self, Pi: Any, d: int, seed: int) -> None:
        """Save the rotation matrix `Pi` of shape (d, d)."""
        self._save(Pi, "rotation", d=d, seed=seed)

    def load_codebook(self, distribution: str, b: int, d: int) -> mx.array:
        """Codebook (2^b,) fp32.

        Raises:
            ArtifactNotFoundError: when it was never saved.
        """
        return self._load("codebook", distribution=distribution, b=b, d=d)

    def save_codebook(self, cb: Any, distribution: str, b: int, d: int) -> None:
        """Save the codebook `cb` of shape (2^b,)."""
        self._save(cb, "codebook", distribution=distribution, b=b, d=d)

    def load_jl_matrix(self, d: int, m: int, seed: int) -> mx.array:
        """Sketch (m, d) fp16.

        Raises:
            ArtifactNotFoundError: when it was never saved.
        """
        return self._load("jl", d=d, m=m, seed=seed)

    def save_jl_matrix(self, S: Any, d: int, m: int, seed: int) -> None:
        """Save the sketch `S` of shape (m, d)."""
        self._save(S, "jl", d=d, m=m, seed=seed)

    def exists(self, artifact_type: str, **kwargs: Any) -> bool:
        """Whether an artifact is there and can be loaded.

        Raises:
            ValueError: for a type other than "rotation", "codebook" and "jl", or other parameters
                than its load method takes.
        """
        array = self._read(_name(artifact_type, kwargs))
        try:
            return array is not None and _checked(artifact_type, array, kwargs) is not None
        except ValueError:  # a file of another shape
            return False


class InMemoryArtifactStore(_Store):
    """Keeps artifacts in this process."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._calibrations: dict[tuple[str, str], Calibration] = {}

    def __repr__(self) -> str:
        return f"InMemoryArtifactStore({len(self._arrays)} arrays)"

    def _read(self, name: str) -> np.ndarray | None:
        return self._arrays.get(name)

    def _write(self, name: str, array: np.ndarray) -> None:
        self._arrays[name] = array

    def save_calibration(self, model: str, method: str, calibration: Calibration) -> None:
        """Keep what `method`'s fitter found for the model with this key."""
        self._calibrations[_safe(model, "model key"), _safe(method, "method")] = calibration

    def load_calibration(self, model: str, method: str) -> Calibration | None:
        """What was saved for this model and method, None without."""
        return self._calibrations.get((model, method))


class NpyArtifactStore(_Store):
    """Keeps artifacts as .npy files in a folder, calibrations as one .npz file a method.

    Files are written beside their place and moved into it, so that a reader never sees half a file
    and several processes may write. Nothing that a file holds is ever run. The folder is made by
    the first save.
    """

    def __init__(self, root_dir: str | Path) -> None:
        self.root = Path(root_dir).expanduser()

    def __repr__(self) -> str:
        return f"NpyArtifactStore({str(self.root)!r})"

    def _read(self, name: str) -> np.ndarray | None:
        return _read_file(self.root / f"{name}.npy", _load_npy)

    def _write(self, name: str, array: np.ndarray) -> None:
        data = io.BytesIO()
        np.save(data, array, allow_pickle=False)
        write_file(self.root / f"{name}.npy", data.getvalue())

    def calibration_file(self, model: str, method: str) -> Path:
        """Where the calibration of a method for the model with this key lies."""
        folder = self.root / "calibration" / _safe(model, "model key")
        return folder / f"{_safe(method, 'method')}.npz"

    def save_calibration(self, model: str, method: str, calibration: Calibration) -> None:
        """Save what `method`'s fitter found for the model with this key.

        Raises:
            ValueError: when an array has a name that is not plain, or is not of numbers.
        """
        path = self.calibration_file(model, method)
        arrays = {f"shared.{k}": v for k, v in calibration.shared.items()}
        for index, layer in enumerate(calibration.layers):
            arrays |= {f"{index}.{k}": v for k, v in layer.items()}
        meta = calibration.meta | {
            "version": CALIBRATION_VERSION,
            "layers": len(calibration.layers),
        }
        packed = {name: _numbers(name, value) for name, value in arrays.items()}
        text = json.dumps(meta, sort_keys=True).encode()
        data = io.BytesIO()
        packed[_META] = np.frombuffer(text, dtype=np.uint8)
        np.savez(data, **packed)  # pyright: ignore[reportArgumentType] - arrays, no flag
        write_file(path, data.getvalue())

    def load_calibration(self, model: str, method: str) -> Calibration | None:
        """What was saved for this model and method; None without, or when it cannot be read."""
        return _read_file(self.calibration_file(model, method), _load_calibration)


def _numbers(name: str, value: Any) -> np.ndarray:
    if not name.partition(".")[2].isidentifier():
        raise ValueError(f"calibration array {name!r}; give it a plain name")
    if isinstance(value, mx.array):
        is_float = mx.issubdtype(value.dtype, mx.floating)
        value = np.array(value.astype(mx.float32) if is_float else value)
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"calibration array {name!r} is of {array.dtype}; give numbers")
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _read_file(path: Path, load: Callable[[Path], Any]) -> Any:
    """What `load` makes of a file; None when it is not there or damaged."""
    try:
        return load(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, TypeError):
        return None


def _load_npy(path: Path) -> np.ndarray:
    return np.load(path, allow_pickle=False)


def _load_calibration(path: Path) -> Calibration:
    with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
        meta = json.loads(file[_META].tobytes())
        if meta.pop("version", None) != CALIBRATION_VERSION:
            raise ValueError("made by another version")
        found = Calibration([{} for _ in range(meta.pop("layers"))], {}, meta)
        for name in file.files:
            if name == _META:
                continue
            place, _, key = name.partition(".")
            home = found.shared if place == "shared" else found.layers[int(place)]
            home[key] = file[name]
    return found


# ---- matrices from a store, or made ---------------------------------------------------------


def _orthogonal(rounded: np.ndarray) -> mx.array:
    """The orthogonal matrix next to a rounded one (two Newton–Schulz steps, error below 1e-10)."""
    x = rounded.astype(np.float64)
    for _ in range(2):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return mx.array(x.astype(np.float32))


@lru_cache(maxsize=64)
def _made_rotation(d: int, seed: int) -> mx.array:
    return _orthogonal(make_rotation_matrix(d, seed).astype(np.float16))


@lru_cache(maxsize=64)
def _made_jl(d: int, m: int, seed: int) -> mx.array:
    return mx.array(make_jl_matrix(d, m, seed).astype(np.float16).astype(np.float32))


def rotation_matrix(d: int, seed: int, store: ArtifactStore | None = None) -> mx.array:
    """Haar rotation (d, d) fp32: from the store if it is there, else made from the seed."""
    if store is not None and store.exists("rotation", d=d, seed=seed):
        return _orthogonal(_array(store.load_rotation_matrix(d, seed), np.float16))
    return _made_rotation(d, seed)


def jl_matrix(d: int, m: int, seed: int, store: ArtifactStore | None = None) -> mx.array:
    """Gaussian sketch (m, d) fp32: from the store if it is there, else made from the seed."""
    if store is not None and store.exists("jl", d=d, m=m, seed=seed):
        return mx.array(_array(store.load_jl_matrix(d, m, seed), np.float32))
    return _made_jl(d, m, seed)


def codebook(
    distribution: str, b: int, d: int, store: ArtifactStore | None, make: Callable[[], np.ndarray]
) -> np.ndarray:
    """Levels (2^b,) fp32: from the store if they are there, else from `make`."""
    if store is not None and store.exists("codebook", distribution=distribution, b=b, d=d):
        return _array(store.load_codebook(distribution, b, d), np.float32)
    return np.asarray(make(), dtype=np.float32)
