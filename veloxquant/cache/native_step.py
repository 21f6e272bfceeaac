"""One attention step through the compiled kernel: gather, evaluate, call, rotate back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.kernels import dispatch, native
from veloxquant.kernels.native import Basis, NativeRun


def attend_native(
    queries: mx.array,
    keys: Sequence[Any],
    values: Sequence[Any],
    *,
    n_kv: int,
    v_dim: int,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attention of queries (B, Hq, L, D): (B, Hq, L, Dv) in fp32; None if the kernel cannot.

    The kernel reads the buffers where they are, so everything is evaluated first: on the CPU this
    costs a synchronisation a layer and saves more than it costs. What is small is computed here in
    numpy, since an operation of MLX costs the CPU backend 30 to 60 µs however small it is.
    """
    key_parts, value_parts = _parts(keys), _parts(values)
    if key_parts is None or value_parts is None:
        return None
    key_runs, value_runs = [r for p in key_parts for r in p], [r for p in value_parts for r in p]
    runs = (*key_runs, *value_runs)
    batch, n_q, length, dim = queries.shape
    rows = n_q // n_kv * length
    exact = queries if queries.dtype == mx.float32 else queries.astype(mx.float32)
    added = _added(mask, length) if isinstance(mask, mx.array) else None
    matrices = _matrices(runs)
    elsewhere = _mapped_by_mlx(exact, key_runs, matrices, scale, (batch, n_kv, rows, dim))
    given = [a for a in (added, sinks) if a is not None]
    mx.eval(exact, *elsewhere.values(), *(a for r in runs for a in r.arrays()), *given)
    folded = (np.asarray(exact) * np.float32(scale)).reshape(batch, n_kv, rows, dim)
    turned = {key: np.asarray(a) for key, a in elsewhere.items()}
    outs: dict[int, np.ndarray] = {}
    for key in {id(r.basis) for r in key_runs} - turned.keys():
        into = matrices.get(key)
        turned[key] = folded if into is None else np.ascontiguousarray(folded @ into)
    for run in value_runs:
        if id(run.basis) not in outs:
            shape = (batch, n_kv, rows, run.dim or v_dim)
            outs[id(run.basis)] = np.zeros(shape, dtype=np.float32)
    elements = sum((r.stop - r.start) * r.width for r in runs) * batch * n_kv
    done = native.attend(
        [turned[id(r.basis)] for r in key_runs],
        key_runs,
        value_runs,
        [outs[id(r.basis)] for r in value_runs],
        tokens=sum(part[0].stop - part[0].start for part in key_parts),
        length=length,
        causal=mask == "causal" if isinstance(mask, str) else False,
        sinks=None if sinks is None else _logits(sinks, n_kv, length),
        mask=None if added is None else np.asarray(added),
        threads=dispatch.threads(elements),
        added=frozenset(id(r) for part in (*key_parts, *value_parts) for r in part[1:]),
    )
    if not done:
        return None
    bases = {id(r.basis): r.basis for r in value_runs}
    return _summed(outs, bases, matrices, (batch, n_q, length, v_dim))


def _matrices(runs: Sequence[NativeRun]) -> dict[int, np.ndarray]:
    """The products that bases are, by their identity."""
    found = {id(r.basis): getattr(r.basis, "product", None) for r in runs}
    return {key: product() for key, product in found.items() if product is not None}


def _mapped_by_mlx(
    exact: mx.array,
    runs: Sequence[NativeRun],
    matrices: dict[int, np.ndarray],
    scale: float,
    shape: tuple[int, ...],
) -> dict[int, mx.array]:
    """Queries in those bases that are not one product."""
    bases = {id(r.basis): r.basis for r in runs if id(r.basis) not in matrices}
    if not any(basis is not None for basis in bases.values()):
        return {}
    q = (exact * scale).reshape(shape)
    return {key: mx.contiguous(basis.rotate_query(q)) for key, basis in bases.items() if basis}


def _summed(
    outs: dict[int, np.ndarray],
    bases: dict[int, Basis | None],
    matrices: dict[int, np.ndarray],
    shape: tuple[int, ...],
) -> mx.array:
    """Sums of all bases as rows of the model's own channels, in `shape`."""
    plain: np.ndarray | None = None
    total: mx.array | None = None
    for key, out in outs.items():
        if (basis := bases[key]) is not None and key not in matrices:
            part = basis.unrotate(mx.array(out))
            total = part if total is None else total + part
            continue
        part = out if basis is None else out @ matrices[key].swapaxes(-1, -2)
        plain = part if plain is None else plain + part
    if total is None:
        assert plain is not None
        return mx.array(plain.reshape(shape))
    return (total if plain is None else total + mx.array(plain)).reshape(shape)


def _logits(sinks: mx.array, n_kv: int, length: int) -> np.ndarray:
    """Sink logits (Hq,) as fp32 (H, M), one for each folded query."""
    heads = np.asarray(sinks.astype(mx.float32)).reshape(n_kv, -1, 1)
    return np.repeat(heads, length, axis=2).reshape(n_kv, -1)


def _parts(runs: Sequence[Any]) -> list[tuple[NativeRun, ...]] | None:
    """Each run's parts, the first of which stands for its tokens; None if one has no such form."""
    out: list[tuple[NativeRun, ...]] = []
    for run in runs:
        form = run.native()
        if form is None:
            return None
        out.append((form,) if isinstance(form, NativeRun) else form)
    return out


def _added(mask: mx.array, length: int) -> mx.array:
    """A bool or additive mask (L, T) or (B or 1, 1, L, T) as fp32 to add: (B or 1, L, T)."""
    wide = mask[None] if mask.ndim == 2 else mask[:, 0]
    if wide.dtype == mx.bool_:
        wide = mx.where(wide, 0.0, -mx.inf)
    shape = (wide.shape[0], length, wide.shape[-1])
    return mx.contiguous(mx.broadcast_to(wide.astype(mx.float32), shape))
