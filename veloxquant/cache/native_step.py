"""One attention step through the compiled kernel: gather, evaluate, call, rotate back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from veloxquant.kernels import dispatch, native
from veloxquant.kernels.native import NativeRun


def attend_native(
    q: mx.array,
    keys: Sequence[Any],
    values: Sequence[Any],
    *,
    v_dim: int,
    length: int,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Attention of folded queries (B, H, M, D), scaled, in fp32; None if the kernel cannot.

    The kernel reads the buffers where they are, so everything is evaluated first: on the CPU this
    costs a synchronisation a layer and saves more than it costs.
    """
    key_parts, value_parts = _parts(keys), _parts(values)
    if key_parts is None or value_parts is None:
        return None
    key_runs, value_runs = [r for p in key_parts for r in p], [r for p in value_parts for r in p]
    runs = (*key_runs, *value_runs)
    turned: dict[int, mx.array] = {}
    for run in key_runs:
        if id(run.basis) not in turned:
            turned[id(run.basis)] = q if run.basis is None else run.basis.rotate_query(q)
    turned = {key: mx.contiguous(a) for key, a in turned.items()}
    arrays = [a for r in runs for a in r.arrays()]
    edge = None if sinks is None else mx.contiguous(sinks[0, :, :, 0])
    added = _added(mask, length) if isinstance(mask, mx.array) else None
    mx.eval(*turned.values(), *arrays, *(a for a in (edge, added) if a is not None))
    queries = {key: np.asarray(a) for key, a in turned.items()}
    batch, heads, rows, _ = q.shape
    outs: dict[int, np.ndarray] = {}
    for run in value_runs:
        shape = (batch, heads, rows, run.dim or v_dim)
        if id(run.basis) not in outs:
            outs[id(run.basis)] = np.zeros(shape, dtype=np.float32)
    elements = sum((r.stop - r.start) * r.width for r in runs) * batch * heads
    done = native.attend(
        [queries[id(r.basis)] for r in key_runs],
        key_runs,
        value_runs,
        [outs[id(r.basis)] for r in value_runs],
        tokens=sum(part[0].stop - part[0].start for part in key_parts),
        length=length,
        causal=mask == "causal" if isinstance(mask, str) else False,
        sinks=None if edge is None else np.asarray(edge),
        mask=None if added is None else np.asarray(added),
        threads=dispatch.threads(elements),
        added=frozenset(id(r) for part in (*key_parts, *value_parts) for r in part[1:]),
    )
    if not done:
        return None
    total: mx.array | None = None
    bases = {id(r.basis): r.basis for r in value_runs}
    for key, out in outs.items():
        part, basis = mx.array(out), bases[key]
        if basis is not None:
            part = basis.unrotate(part)
        total = part if total is None else total + part
    return total


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
