"""Every ready row of the method table on rows as large as fp16 can be."""

import mlx.core as mx
from cache_lab import KEEPING, Tokens, attend, every_row, held_rows, plan_of, shape_of, small_config

from veloxquant.cache.builder import new_caches
from veloxquant.cache.table import MethodRow

LARGEST = 60_000.0
SHRUNK = LARGEST / 2.0**12
"""The same rows where nothing can overflow: a power of two leaves their digits alone."""
LENGTH = 580
"""Every method that fits something has done so by then."""


def rows_up_to(peak: float, length: int, layer: int) -> Tokens:
    """fp16 tokens with entries up to `peak`: everywhere in one head, in few channels in the other.

    Queries are so small that fp16 holds the scores.
    """
    draws = mx.random.split(mx.random.key(7), 3)
    loud = mx.where(mx.arange(128) % 50 == 3, 1.0, 0.1)
    # The next layer's rows are like those of this one, so that some of them are merged.
    loud = mx.stack([mx.ones(128), loud])[None, :, None] * (peak * 0.9**layer)
    shape = (1, 2, length, 128)
    keys, values = (mx.random.uniform(-1, 1, shape, key=key) * loud for key in draws[1:])
    queries = mx.random.normal(shape, key=draws[0]) / 100
    return Tokens(*(a.astype(mx.float16) for a in (queries, keys, values)))


def relative(got: mx.array, want: mx.array) -> list[float]:
    """Error over length of each head; largest numbers first brought near one."""
    got, want = (a.astype(mx.float32)[0] / LARGEST for a in (got, want))
    lost, whole = (mx.square(a).sum(axis=(-1, -2)) for a in (got - want, want))
    return mx.sqrt(lost / whole).tolist()  # type: ignore[return-value]


def errors(row: MethodRow, peak: float) -> list[float]:
    """Relative errors of what each layer holds; whatever it gives must be finite."""
    length = LENGTH if row in KEEPING else 200
    # Some methods merge the deeper half of the layers only.
    count = 2 * row.couples if row.couples > 1 else 1
    layers = [rows_up_to(peak, length, i) for i in range(count)]
    caches = new_caches(plan_of(shape_of(layers[0]), count), small_config(row, head_dim=128))
    for start, stop in ((0, length - 1), (length - 1, length)):
        for cache, tokens in zip(caches, layers, strict=True):
            assert mx.isfinite(attend(cache, tokens.cut(start, stop))).all().item()
    out = []
    for cache, tokens in zip(caches, layers, strict=True):
        cache.commit()
        for got, want in zip(held_rows(cache), tokens[1:], strict=True):
            assert mx.isfinite(got).all().item()
            if got.shape == want.shape:
                out += relative(got, want)
    return out


@every_row
def test_rows_up_to_the_largest_number_lose_no_more_than_small_ones(row: MethodRow) -> None:
    for now, usual in zip(errors(row, LARGEST), errors(row, SHRUNK), strict=True):
        assert now <= 1.03 * usual + 2e-3
