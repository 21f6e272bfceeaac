"""Transform coding as functions on plain matrices, for analysis and files.

Every component has a grid of its own, and the codes are stored by DEFLATE where that is smaller.
Caches use `transform.py`.
Source: KVTC (arXiv 2511.01815).
"""

from dataclasses import dataclass, field
from math import ceil

import mlx.core as mx
import numpy as np

from veloxquant.allocators.kvtc_dp import BIT_CHOICES, dp_allocate_bits
from veloxquant.quantizers.entropy import deflate, inflate
from veloxquant.quantizers.transform import STEPS

_FLOAT_BYTES = 4


@dataclass
class KVTCArtifact:
    """A coded matrix (S, D): basis `V` (D, r), `mean` (D,), bits of the r components, their codes.

    Grids belong to the components in `survived_idx`, those with bits. `is_entropy_coded` is False
    when the payload is at fixed width because coding would enlarge it.
    """

    V: mx.array
    mean: mx.array
    bit_allocation: np.ndarray
    S: int
    n_survived: int
    entropy_payload: bytes
    entropy_table: dict = field(default_factory=dict)
    quant_min: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    quant_scale: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    survived_idx: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    is_entropy_coded: bool = True


def kvtc_local_pca_batched(
    tensor: mx.array,
) -> tuple[list[mx.array], list[mx.array], list[mx.array], list[np.ndarray]]:
    """Principal components of each matrix of (BH, S, D).

    Returns:
        For each matrix projections (S, r), basis (D, r), mean (D,) and variances (r,), largest
        first, with r = min(S, D).
    """
    rows = np.array(tensor.astype(mx.float32), dtype=np.float64)
    mean = rows.mean(axis=1, keepdims=True)
    _, s, vt = np.linalg.svd(rows - mean, full_matrices=False)
    projected = (rows - mean) @ vt.swapaxes(-1, -2)
    variances = np.square(s) / rows.shape[1]

    def arrays(parts: np.ndarray) -> list[mx.array]:
        return [mx.array(np.ascontiguousarray(part, np.float32)) for part in parts]

    basis = arrays(vt.swapaxes(-1, -2))
    return arrays(projected), basis, arrays(mean[:, 0]), list(variances)


def quantize_component(col: np.ndarray, bits: int) -> tuple[np.ndarray, float, float]:
    """Codes 0 to 2^bits - 1 of one column (S,), the least level and the step.

    Of the grid between the extremes and the best one for a Gaussian of the same spread, the one
    with the smaller error: at few bits the first may lose more than no code at all.
    """
    low, top = float(col.min()), (1 << bits) - 1
    wide = low, (float(col.max()) - low) / top
    step = STEPS[bits] * float(col.std())
    grids = (wide, (float(col.mean()) - step * top / 2, step))
    coded = [_on_grid(col, least, scale, top) for least, scale in grids]
    lost = [
        np.square(codes * scale + least - col).sum()
        for codes, (least, scale) in zip(coded, grids, strict=True)
    ]
    best = int(lost[1] < lost[0])
    return coded[best], *grids[best]


def _on_grid(col: np.ndarray, least: float, scale: float, top: int) -> np.ndarray:
    codes = np.round((col - least) / scale) if scale > 0 else np.zeros(len(col))
    return codes.clip(0, top).astype(np.uint8)


def kvtc_compress(
    tensor: mx.array,
    total_bit_budget: int,
    bit_choices: tuple[int, ...] = BIT_CHOICES,
    beta: float = 3.5,
) -> KVTCArtifact:
    """Code (S, D) with at most `total_bit_budget` bits for each row."""
    projected, basis, mean, variances = kvtc_local_pca_batched(tensor[None])
    return kvtc_compress_from_pca_fit(
        projected[0], basis[0], mean[0], variances[0], tensor.shape[0], total_bit_budget,
        bit_choices, beta,
    )  # fmt: skip


def kvtc_compress_from_pca_fit(
    L: mx.array,
    V: mx.array,
    mean: mx.array,
    variances: np.ndarray,
    S: int,
    total_bit_budget: int,
    bit_choices: tuple[int, ...] = BIT_CHOICES,
    beta: float = 3.5,
) -> KVTCArtifact:
    """Code projections L (S, r) on a basis V (D, r) that is known already."""
    bits = dp_allocate_bits(variances, total_bit_budget, bit_choices, beta)
    kept = np.flatnonzero(bits)
    columns = np.array(L.astype(mx.float32))[:S]
    coded = [quantize_component(columns[:, i], int(bits[i])) for i in kept]
    codes = np.stack([c for c, _, _ in coded]) if coded else np.zeros((0, S), np.uint8)
    fixed = _at_width(codes, bits[kept])
    packed = deflate(codes)
    smaller = len(packed) < len(fixed)
    return KVTCArtifact(
        V=V, mean=mean, bit_allocation=bits, S=S, n_survived=len(kept),
        entropy_payload=packed if smaller else fixed,
        quant_min=np.array([low for _, low, _ in coded], np.float32),
        quant_scale=np.array([scale for _, _, scale in coded], np.float32),
        survived_idx=kept, is_entropy_coded=smaller,
    )  # fmt: skip


def _at_width(codes: np.ndarray, bits: np.ndarray) -> bytes:
    """Codes (n, S) at their widths, each component in whole bytes."""
    return b"".join(
        np.packbits(np.unpackbits(row[:, None], axis=1)[:, 8 - width :]).tobytes()
        for row, width in zip(codes, bits, strict=True)
    )


def _from_width(data: bytes, bits: np.ndarray, S: int) -> np.ndarray:
    """Inverse of `_at_width`."""
    out, at = np.zeros((len(bits), S), np.uint8), 0
    for row, width in zip(out, bits.tolist(), strict=True):
        size = ceil(S * width / 8)
        part = np.frombuffer(data, np.uint8, size, at)
        at += size
        places = np.unpackbits(part)[: S * width].reshape(S, width)
        row[:] = places @ (1 << np.arange(width)[::-1])
    return out


def kvtc_decompress(artifact: KVTCArtifact) -> mx.array:
    """Rows (S, D) fp16."""
    kept, widths = artifact.survived_idx, artifact.bit_allocation[artifact.survived_idx]
    if artifact.is_entropy_coded:
        data = np.frombuffer(inflate(artifact.entropy_payload), np.uint8)
        codes = data.reshape(len(kept), artifact.S)
    else:
        codes = _from_width(artifact.entropy_payload, widths, artifact.S)
    z = codes.T.astype(np.float32) * artifact.quant_scale + artifact.quant_min
    basis = artifact.V[:, mx.array(kept.astype(np.uint32))] if len(kept) else artifact.V[:, :0]
    rows = mx.array(z) @ basis.T if len(kept) else mx.zeros((artifact.S, artifact.V.shape[0]))
    return (rows + artifact.mean).astype(mx.float16)


def _side_bytes(artifact: KVTCArtifact) -> int:
    """Basis of the components with bits, mean and grids in fp32, a byte of width for each."""
    dim, kept = artifact.V.shape[0], artifact.n_survived
    return _FLOAT_BYTES * (dim * kept + dim + 2 * kept) + len(artifact.bit_allocation)


def kvtc_fp16_bytes(artifact: KVTCArtifact) -> int:
    """Bytes of the artifact as it is."""
    return _side_bytes(artifact) + len(artifact.entropy_payload)


def kvtc_pre_entropy_bytes(artifact: KVTCArtifact) -> int:
    """Bytes of the artifact with its codes at fixed width."""
    widths = artifact.bit_allocation[artifact.survived_idx]
    return _side_bytes(artifact) + sum(ceil(artifact.S * int(b) / 8) for b in widths)
