"""Eigenbases of a model's keys and values, by layer, and the file they are kept in.

An entry is `(key_U, val_U, key_eig, val_eig, key_ds, val_ds)`: eigenvectors in columns (D, D),
variances (D,) by which they are sorted, and the rounded participation ratio.
"""

import io
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache.probe import probe
from veloxquant.cache.sampling import collect
from veloxquant.config.rotations import is_plain_name, rotations_file
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.spectral import eigenbasis
from veloxquant.spectral.participation_ratio import participation

FORMAT = 1
_FIELDS = ("key_U", "val_U", "key_eig", "val_eig", "key_ds", "val_ds")
Entry = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int]


def _file(model_name: str) -> Path:
    if not is_plain_name(model_name):
        raise QuantizerConfigError(
            f"model_name={model_name!r} is not possible; use letters, digits, '.', '_' and '-'"
        )
    return rotations_file(model_name)


def load_cached_rotations(model_name: str) -> dict[int, Entry] | None:
    """Entries by layer as `save_rotations` kept them; None when there are none to read.

    Raises:
        QuantizerConfigError: for a name that is not plain.
    """
    path = _file(model_name)
    try:
        with np.load(path, allow_pickle=False) as file:
            if int(file["format"]) != FORMAT:
                return None
            layers = [int(n) for n in file["layers"]]
            found = {n: [file[f"{n}.{field}"] for field in _FIELDS] for n in layers}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return {n: (a, b, c, d, int(e), int(f)) for n, (a, b, c, d, e, f) in found.items()}


def save_rotations(
    model_name: str, rotations: dict[int, tuple], n_tokens: int | None = None
) -> None:
    """Keep entries under a name, bit by bit; what was kept under it is replaced.

    Raises:
        QuantizerConfigError: for a name that is not plain, or an entry that is not one.
    """
    path = _file(model_name)
    arrays: dict[str, Any] = {
        "format": np.int64(FORMAT), "layers": np.array(sorted(rotations), dtype=np.int64),
        "n_tokens": np.int64(-1 if n_tokens is None else n_tokens),
    }  # fmt: skip
    for layer, entry in rotations.items():
        check_entry(entry)
        for field, value in zip(_FIELDS, entry, strict=True):
            arrays[f"{layer}.{field}"] = np.asarray(value)
    data = io.BytesIO()
    np.savez(data, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and then moved into it: a reader never sees half a file.
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.getvalue())
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def check_entry(entry: tuple, dims: tuple[int, int] | None = None) -> None:
    """Raise unless an entry has six parts that belong together, of these head sizes if given.

    Raises:
        QuantizerConfigError: saying what is wrong.
    """
    if len(entry) != len(_FIELDS):
        raise QuantizerConfigError(
            f"an entry has {len(entry)} parts; it must be ({', '.join(_FIELDS)})"
        )
    for vectors, variances, side in ((entry[0], entry[2], 0), (entry[1], entry[3], 1)):
        shape, size = np.shape(vectors), np.shape(variances)[-1:]
        wanted = size[0] if dims is None and size else dims[side] if dims else 0
        if shape[-2:] != (wanted, wanted) or size != (wanted,):
            what = ("keys", "values")[side]
            raise QuantizerConfigError(
                f"the rotation of {what} has shape {shape} and {size} variances; it must be "
                f"({wanted}, {wanted}) with ({wanted},): it was made for another model"
            )


def collect_kv_vectors_mlx(
    model: Any, calibration_tokens: Any, n_tokens_per_run: int = 512
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Keys and values of every compressed layer, those of all KV heads in one matrix (N, d) each.

    Args:
        model: a loaded mlx-lm model.
        calibration_tokens: token ids; nested lists are read one after the other.
        n_tokens_per_run: tokens kept of a layer and head.
    """
    tokens = np.asarray(calibration_tokens).reshape(-1).astype(int).tolist()
    keys, values = {}, {}
    for sample in collect(probe(model), tokens, n_tokens_per_run):
        for out, rows in ((keys, sample.keys), (values, sample.values)):
            out[sample.layer] = np.array(rows.reshape(-1, rows.shape[-1]))
    return keys, values


def calibrate_from_vectors(
    key_vectors: dict[int, np.ndarray],
    val_vectors: dict[int, np.ndarray],
    model_name: str = "synthetic",
) -> dict[int, Entry]:
    """Entries from vectors (N, d) by layer; they are kept under the name."""
    out: dict[int, Entry] = {}
    for layer in sorted(key_vectors):
        parts = []
        for rows in (key_vectors[layer], val_vectors[layer]):
            vectors, variances = eigenbasis(mx.array(np.asarray(rows, dtype=np.float32))[None])
            parts.append((vectors[0], variances[0]))
        (key_u, key_eig), (val_u, val_eig) = parts
        sizes = [max(1, round(participation(eig))) for eig in (key_eig, val_eig)]
        out[layer] = (key_u, val_u, key_eig, val_eig, sizes[0], sizes[1])
    save_rotations(model_name, out, max((len(v) for v in key_vectors.values()), default=0))
    return out


def calibrate_spectral_rotation(
    model: Any,
    calibration_tokens: Any,
    n_tokens: int = 512,
    model_name: str = "model",
    force_recompute: bool = False,
) -> dict[int, Entry]:
    """Entries of a model, from the file under the name if they fit it, else from the tokens.

    Args:
        model: a loaded mlx-lm model.
        calibration_tokens: token ids.
        n_tokens: tokens kept of a layer and head.
        model_name: what entries are kept under; a configuration names it as `spectral_model_name`.
        force_recompute: do not look for kept entries.
    """
    kept = None if force_recompute else load_cached_rotations(model_name)
    if kept is not None and _fits(kept, [s[2:4] for s in probe(model).shapes()]):
        return kept
    keys, values = collect_kv_vectors_mlx(model, calibration_tokens, n_tokens)
    return calibrate_from_vectors(keys, values, model_name)


def _fits(entries: dict[int, Entry], dims: Sequence[Sequence[int]]) -> bool:
    """Whether there is an entry of the right sizes for each layer."""
    sizes = [(len(entries[n][2]), len(entries[n][3])) for n in sorted(entries)]
    return sorted(entries) == list(range(len(dims))) and sizes == [tuple(d) for d in dims]
