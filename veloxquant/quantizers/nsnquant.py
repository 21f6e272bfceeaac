"""The steps of nsnquant as functions of arrays, under their documented names.

Source: NSNQuant (arXiv 2505.18231).
"""

from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.math.kmeans import Nearest
from veloxquant.quantizers import gaussian
from veloxquant.quantizers.bit_stream import pack_codes, unpack_codes
from veloxquant.quantizers.hadamard import hadamard_matrix, hadamard_rows
from veloxquant.quantizers.nsn import normalise_shift_normalise, root_mean_square

MAX_CODEBOOK = 256
"""Entries that a uint8 index can name."""


def nsn_transform(x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Normalise, shift and normalise the tokens of one chunk (..., T, d).

    Returns:
        Tokens (..., T, d) fp32 of norm sqrt(d), `s1` (..., T, 1) fp16, the mean `o` (..., 1, d)
        fp32 and `s2` (..., T, 1) fp16; statistics are those of this chunk alone.
    """
    return normalise_shift_normalise(x, mx.float16)


def nsn_inverse(x_nsn: mx.array, s1: mx.array, o: mx.array, s2: mx.array) -> mx.array:
    """`s1 (s2 x_nsn + o)`, in fp32."""
    s1, o, s2 = (a.astype(mx.float32) for a in (s1, o, s2))
    return s1 * (s2 * x_nsn.astype(mx.float32) + o)


def build_universal_codebook(
    codebook_size: int = 256,
    subvector_dim: int = 8,
    seed: int = 1234,
    n_samples: int = 262144,
    iters: int = 25,
    kind: gaussian.Kind = "signed",
) -> np.ndarray:
    """Centroids (codebook_size, subvector_dim) float32 of unit-variance Gaussian vectors.

    Rows are centroids, not directions: short entries are part of what makes the error small.

    Args:
        codebook_size: at most 256.
        subvector_dim: channels of an entry.
        seed: of samples and start.
        n_samples: vectors trained on.
        iters: rounds of k-means at most.
        kind: "signed" for 1 bit, "magnitude" for 2 bits with signs apart.

    Raises:
        ValueError: for a size or kind out of range.
    """
    if not 1 <= codebook_size <= MAX_CODEBOOK or min(subvector_dim, n_samples, iters) < 1:
        raise ValueError(
            f"codebook_size={codebook_size} must be 1 to {MAX_CODEBOOK}, subvector_dim="
            f"{subvector_dim}, n_samples={n_samples} and iters={iters} at least 1"
        )
    if kind not in ("signed", "magnitude"):
        raise ValueError(f"kind={kind!r} must be 'signed' or 'magnitude'")
    made = gaussian.gaussian_centroids(codebook_size, subvector_dim, seed, n_samples, iters, kind)
    return made.copy()


def vq_encode(x_nsn: mx.array, codebook: np.ndarray, bits: int) -> dict[str, Any]:
    """Codes of normalised (and rotated) tokens (..., T, d).

    Args:
        x_nsn: tokens.
        codebook: (K, sub), K at most 256; magnitudes for 2 bits.
        bits: 1 or 2.

    Returns:
        `idx` (..., T, d/sub) uint8, `signs` (..., T, d/32) uint32 words with 1 for + at 2 bits,
        else None, and `dim`, `bits`.

    Raises:
        ValueError: when bits, codebook and tokens do not go together.
    """
    dim, (size, sub) = x_nsn.shape[-1], codebook.shape
    if bits not in (1, 2) or size > MAX_CODEBOOK or dim % sub:
        raise ValueError(
            f"bits={bits} must be 1 or 2, the codebook's {size} entries at most {MAX_CODEBOOK}, "
            f"and its {sub} channels a divisor of {dim}"
        )
    x = x_nsn.astype(mx.float32)
    signs = pack_codes(x >= 0, 1) if bits == 2 else None
    rows = np.array(mx.abs(x) if bits == 2 else x).reshape(-1, sub)
    codes = Nearest(codebook)(rows).astype(np.uint8)
    idx = mx.array(codes).reshape(*x.shape[:-1], dim // sub)
    return {"idx": idx, "signs": signs, "dim": dim, "bits": bits}


def vq_decode(encoded: dict[str, Any], codebook: np.ndarray) -> mx.array:
    """Tokens (..., T, d) fp32 of `vq_encode`, brought back to norm sqrt(d)."""
    rows = mx.take(mx.array(codebook), encoded["idx"].astype(mx.uint32), axis=0).flatten(-2)
    if encoded["bits"] == 2:
        rows = mx.where(unpack_codes(encoded["signs"], 1, encoded["dim"]), rows, -rows)
    return rows / mx.maximum(root_mean_square(rows), 1e-30)


def hadamard_forward(x: mx.array) -> mx.array:
    """The orthonormal Hadamard rotation of the last axis, in the type of `x`."""
    return hadamard_rows(x.astype(mx.float32)).astype(x.dtype)


def hadamard_inverse(y: mx.array) -> mx.array:
    """Inverse of `hadamard_forward`."""
    return (y.astype(mx.float32) @ hadamard_matrix(y.shape[-1]).T).astype(y.dtype)
