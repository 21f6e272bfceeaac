"""Filters of Q-Filters: the direction that the queries of a head share, measured and kept.

Queries are not centred: their mean is the signal. Filters point along the queries, so keys are
kept by a large product.
Source: Q-Filters (arXiv 2503.02812).
"""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.cache.probe import probe
from veloxquant.cache.sampling import sample_pieces
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.core.whole_files import write_file

QFILTERS_ARTIFACT_VERSION = 1
_META = "about"


@dataclass(frozen=True)
class QFiltersCalibration:
    """Filters of a model and where they come from.

    Attributes:
        filters: of each layer (n_kv_heads, D), unit length.
        model_id: the model they belong to.
        n_samples: queries of each head that were looked at.
        dataset: the text.
    """

    filters: list[mx.array]
    model_id: str
    n_samples: int
    dataset: str

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.filters)

    def head_dim(self) -> int:
        """Channels of a head, 0 without layers."""
        return self.filters[0].shape[-1] if self.filters else 0


def compute_qfilters(queries: mx.array, max_svd_samples: int = 3000) -> mx.array:
    """The first right singular vector of each head's queries, turned so that most are along it.

    Args:
        queries: (H, N, D) after rotation, any float type.
        max_svd_samples: queries of a head to look at, spread evenly.

    Returns:
        (H, D) fp32, unit length; a head whose queries are all zero gets zeros.

    Raises:
        ValueError: for another shape, no queries, or numbers that are not finite.
    """
    if queries.ndim != 3 or queries.shape[1] == 0 or max_svd_samples < 1:
        raise ValueError(f"queries of shape {queries.shape}; give (H, N, D) with N at least 1")
    x = np.array(queries.astype(mx.float32), dtype=np.float64)
    if not np.isfinite(x).all():
        raise ValueError("queries must be finite numbers")
    if x.shape[1] > max_svd_samples:
        x = x[:, np.linspace(0, x.shape[1] - 1, max_svd_samples).astype(np.int64)]
    peak = np.abs(x).max(axis=(1, 2), keepdims=True)
    x = x / np.where(peak > 0, peak, 1)
    # The Gram matrix (D, D) has the same right singular vectors and does not grow with N.
    first = np.linalg.eigh(x.swapaxes(1, 2) @ x)[1][..., -1]
    along = np.einsum("hnd,hd->hn", x, first)
    # As many on both sides: the sum decides, and it is no tie unless it is zero.
    votes = (along > 0).sum(axis=1) - (along < 0).sum(axis=1) + 1e-9 * np.sign(along.sum(axis=1))
    first = first * np.where(votes < 0, -1.0, 1.0)[:, None]
    first = np.where(peak[:, :, 0] > 0, first, 0.0)
    return mx.array(first.astype(np.float32))


def average_gqa_filters(filters: mx.array, n_kv_heads: int) -> mx.array:
    """Mean filter of the query heads that share a KV head, (n_kv_heads, D), unit length.

    Raises:
        ValueError: when the query heads (H_q, D) do not divide evenly.
    """
    heads, dim = filters.shape
    if n_kv_heads < 1 or heads % n_kv_heads:
        raise ValueError(f"{heads} query heads cannot share {n_kv_heads} KV heads")
    mean = filters.astype(mx.float32).reshape(n_kv_heads, heads // n_kv_heads, dim).mean(axis=1)
    length = mx.linalg.norm(mean, axis=-1, keepdims=True)
    return mean / mx.maximum(length, 1e-12)


def collect_query_activations(
    model: Any,
    tokenizer: Any,
    texts: list[str],
    max_length: int = 2048,
    max_samples_per_head: int = 3000,
    seed: int = 0,
) -> list[mx.array]:
    """Rotated queries (H_q, N, D) fp32 of every compressed layer.

    Args:
        model: an mlx-lm model; it is not changed.
        tokenizer: its tokenizer, anything with `encode(text)`.
        texts: what to read.
        max_length: most tokens of a text.
        max_samples_per_head: most queries of a head to keep.
        seed: of the choice.

    Raises:
        QuantizerConfigError: when the model computes attention itself, so that its queries cannot
            be seen, or there is no text.
    """
    pieces: list[Sequence[int]] = [list(tokenizer.encode(text))[:max_length] for text in texts]
    found = sample_pieces(probe(model), pieces, max_samples_per_head, seed=seed)
    queries: list[mx.array] = []
    for sample in found:
        if sample.queries is None:
            raise QuantizerConfigError(
                "this model computes attention itself, so its queries cannot be seen; "
                "Q-Filters then uses keys alone"
            )
        queries.append(sample.queries[:, :max_samples_per_head])
    return queries


def save_qfilters(calibration: QFiltersCalibration, path: str | Path) -> Path:
    """Write filters as .npz in one step; the ending is added when it is missing."""
    place = Path(path).expanduser()
    if place.suffix != ".npz":
        place = place.with_name(place.name + ".npz")
    about = {
        "version": QFILTERS_ARTIFACT_VERSION,
        "model_id": calibration.model_id,
        "n_samples": calibration.n_samples,
        "dataset": calibration.dataset,
    }
    arrays = {f"layer_{i}": np.array(f) for i, f in enumerate(calibration.filters)}
    arrays[_META] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    data = io.BytesIO()
    np.savez(data, **arrays)  # pyright: ignore[reportArgumentType] - arrays, no flag
    write_file(place, data.getvalue())
    return place


def load_qfilters(path: str | Path, expect_model_id: str | None = None) -> QFiltersCalibration:
    """Read what `save_qfilters` wrote.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: for another file, another version, or filters of another model.
    """
    place = Path(path).expanduser()
    try:
        with place.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            about = json.loads(file[_META].tobytes())
            names = [f"layer_{i}" for i in range(len(file.files) - 1)]
            filters = [mx.array(file[name].astype(np.float32)) for name in names]
        found = QFiltersCalibration(
            filters, str(about["model_id"]), int(about["n_samples"]), str(about["dataset"])
        )
        version = about["version"]
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{place} holds no filters of Q-Filters; measure them again") from error
    if version != QFILTERS_ARTIFACT_VERSION:
        raise ValueError(f"{place} is of version {version}; measure the filters again")
    if expect_model_id is not None and found.model_id != expect_model_id:
        raise ValueError(f"{place} is of {found.model_id!r}, not of {expect_model_id!r}")
    if any(f.ndim != 2 or f.shape[-1] != found.head_dim() for f in found.filters):
        raise ValueError(f"{place} holds filters of unlike shapes")
    return found
