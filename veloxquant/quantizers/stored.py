"""Codecs whose rotations and levels come from an artifact store instead of from the seed.

A store is anything with the methods of `core.abstractions.ArtifactStore`; what it does not have is
made from the seed. Levels are kept for N(0, 1/D), as the documents have them.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.artifacts import jl_matrix, rotation_matrix
from veloxquant.core.exceptions import CodebookDimensionMismatch, QuantizerConfigError
from veloxquant.quantizers.base import Shared
from veloxquant.quantizers.channel_split import ChannelSplitCodec
from veloxquant.quantizers.codebook import CodebookCodec
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.polar import PolarCodec
from veloxquant.quantizers.rotation import Matrix
from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.sketch import GaussianSketch, SketchCodec
from veloxquant.quantizers.sketched_codebook import SketchedCodebookCodec
from veloxquant.quantizers.specs.channel_split import ChannelSplitSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.polar import PolarSpec
from veloxquant.quantizers.specs.sketch import SketchedCodebookSpec, SketchSpec

_SYMMETRIC = 1e-3


def codec_with(store: Any, spec: CodecSpec, dim: int) -> Any:
    """The codec of a spec, with what the store has for it.

    Raises:
        CodebookDimensionMismatch: when a stored codebook has another number of levels, or levels
            that are not symmetric.
        QuantizerConfigError: when it is no store.
    """
    if not hasattr(store, "exists"):
        raise QuantizerConfigError(
            f"store={store!r} is no artifact store; give an NpyArtifactStore(folder)"
        )
    if isinstance(spec, ChannelSplitSpec):
        quiet = codec_with(store, spec.quiet, dim - spec.n_loud)
        loud = codec_with(store, spec.loud, spec.n_loud)
        return ChannelSplitCodec(dim, spec, (quiet, loud))
    if isinstance(spec, CodebookSpec):
        basis = stored_rotation(store, dim, spec.seed)
        levels = stored_levels(store, spec.bits, dim) if spec.table == "flat" else None
        if basis is not None or levels is not None:
            return _from(CodebookCodec(dim, spec, basis, levels), basis, levels)
    if isinstance(spec, PolarSpec) and (basis := stored_rotation(store, dim, spec.seed)):
        return _from(PolarCodec(dim, spec, basis), basis)
    if isinstance(spec, SketchSpec):
        given = stored_sketch(store, dim, spec.rows or dim, spec.seed)
        if given is not None:
            return _from(SketchCodec(dim, spec, given), given)
    if isinstance(spec, SketchedCodebookSpec):
        basis = stored_rotation(store, dim, spec.seed)
        levels = stored_levels(store, spec.bits - 1, dim) if spec.bits > 1 else None
        given = stored_sketch(store, dim, spec.rows or dim, spec.seed)
        if basis is not None or levels is not None or given is not None:
            made = SketchedCodebookCodec(dim, spec, basis, levels, given)
            return _from(made, basis, levels, given)
    return codec_for(spec, dim)


def _from(codec: Shared, *found: Matrix | GaussianSketch | tuple[float, ...] | None) -> Shared:
    """The codec, which remembers what the store gave for it."""
    for one in found:
        if isinstance(one, Matrix | GaussianSketch):
            codec.foreign += (one.matrix,)
        elif one is not None:
            codec.foreign += (mx.array(one),)
    return codec


def stored_sketch(store: Any, dim: int, rows: int, seed: int) -> GaussianSketch | None:
    """The sketch of this size and seed."""
    if not store.exists("jl", d=dim, m=rows, seed=seed):
        return None
    return GaussianSketch(jl_matrix(dim, rows, seed, store))


def stored_rotation(store: Any, dim: int, seed: int) -> Matrix | None:
    """The rotation of this size and seed, made orthogonal again after its fp16 rounding."""
    if not store.exists("rotation", d=dim, seed=seed):
        return None
    return Matrix(rotation_matrix(dim, seed, store))


def stored_levels(store: Any, bits: int, dim: int) -> tuple[float, ...] | None:
    """The Gaussian levels for this size, scaled to unit variance.

    Raises:
        CodebookDimensionMismatch: see `codec_with`.
    """
    if not store.exists("codebook", distribution="gaussian", b=bits, d=dim):
        return None
    found = store.load_codebook("gaussian", bits, dim)
    values = np.array(found.astype(mx.float32) if isinstance(found, mx.array) else found)
    levels = np.sort(values.astype(np.float64).ravel()) * math.sqrt(dim)
    if levels.shape != (1 << bits,):
        raise CodebookDimensionMismatch(
            f"the stored codebook for b={bits}, d={dim} has {levels.size} levels, "
            f"it needs {1 << bits}; save it again"
        )
    if np.abs(levels + levels[::-1]).max() > _SYMMETRIC * np.abs(levels).max():
        raise CodebookDimensionMismatch(
            f"the stored codebook for b={bits}, d={dim} is not symmetric about zero, as the "
            f"levels of a rotated vector are; save Gaussian levels"
        )
    return tuple((levels - levels[::-1]) / 2)
