"""Rows of a token-local store that change their head or their content, without coding the others.

Packed words are moved as they are; only a row that changed is coded anew, once.
"""

import mlx.core as mx

from veloxquant.cache.selection import pick_rows
from veloxquant.cache.store import Store
from veloxquant.quantizers.sizes import round_up


def share_rows(store: Store, keep: mx.array) -> None:
    """Keep the rows at `keep` (B, H·b) of all heads, as b rows for each of the H heads.

    Args:
        store: rows of H heads, n of each.
        keep: ascending int32, head h's row i being h·n + i; see `pooled_heads.competing_rows`.
    """
    start, stop, capacity, arrays = store.live
    n, axes = stop - start, store.codec.axes
    count = 0
    moved = {}
    for name, a in arrays.items():
        if name not in axes:
            moved[name] = a
            continue
        batch, heads, _, *rest = a.shape
        at = (keep // n * capacity + keep % n + start)[:, None]
        rows = pick_rows(a.reshape(batch, 1, heads * capacity, *rest), at)
        rows = rows.reshape(batch, heads, -1, *rest)
        count = rows.shape[2]
        room = round_up(count, store.step) - count
        moved[name] = mx.pad(rows, [(0, 0), (0, 0), (0, room), *((0, 0) for _ in rest)])
    store.adopt([0, count, round_up(count, store.step), moved])


def change_rows(store: Store, rows: mx.array, changed: mx.array, most: int) -> None:
    """Code those of `rows` anew that changed; the others stay as they are packed.

    Args:
        store: the rows as they were, n of each head.
        rows: (B, H, n, D) as they should be.
        changed: (B, H, n) bool.
        most: rows of a head that can have changed at most.
    """
    n = store.length
    at = mx.broadcast_to(mx.arange(n, dtype=mx.int32), changed.shape)
    if most < n:
        # The sort is stable: changed rows first, and some of the others to fill the rectangle.
        at = mx.argsort(mx.where(changed, 0, 1), axis=-1)[..., :most].astype(mx.int32)
        rows, changed = pick_rows(rows, at), mx.take_along_axis(changed, at, axis=-1)
    write_rows(store, at, rows, changed)


def write_rows(store: Store, at: mx.array, rows: mx.array, changed: mx.array) -> None:
    """Code rows (B, H, m, D) in the places `at` (B, H, m) of the store, where they changed.

    Args:
        store: the rows as they were.
        at: int32, each place once.
        rows: what the places should hold.
        changed: (B, H, m) bool.
    """
    start, stop, capacity, arrays = store.live
    at, changed = at[..., None] + start, changed[..., None]
    written = {}
    for name, new in store.codec.encode(rows).items():
        old = mx.take_along_axis(arrays[name], at, axis=2)
        new = mx.where(changed, new, old)
        place = mx.broadcast_to(at, new.shape)
        written[name] = mx.put_along_axis(arrays[name], place, new, axis=2)
    store.adopt([start, stop, capacity, {**arrays, **written}])
