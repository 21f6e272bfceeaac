"""The compiled kernel agrees with the array operations for every format, shape and mask.

Both routes read the same stores; the array operations run with the library taken away, so that
nothing of them is compiled. A pairwise cover of the cases runs always, the whole grid is slow.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache import store as store_module
from veloxquant.cache.attend import Fresh, attend
from veloxquant.cache.store import Store
from veloxquant.kernels import dispatch, native
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.plain import PlainSpec

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the optional compiled kernel was not built"
)
HEADS = 2
CLOSE = 1e-5
FAR = 2e-5
"""Of the whole grid, whose longest sums, 4,096 tokens of 256 channels, round by more."""
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
BY_TOKEN = (
    "plain",
    *(f"token {bits}" for bits in AFFINE_BITS),
    *(f"codebook {bits}" for bits in range(1, 7)),
)
KEYS = (*BY_TOKEN, *(f"channel {bits}" for bits in AFFINE_BITS))
GRID = {
    "repeat": (1, 3, 4, 8),
    "dim": (64, 80, 96, 128, 256),
    "tokens": (1, 31, 32, 33, 1000, 4096),
    "batch": (1, 3),
}
FACTORS: Mapping[str, Sequence[Any]] = {
    "keys": KEYS,
    "values": KEYS,
    **GRID,
    "v_dim": GRID["dim"],
    "length": (1, 2, 3, 4),
    "mask": ("none", "causal", "bool", "additive", "window", "one row"),
    "sinks": (False, True),
    "group": (32, 64, 128),
    "dtype": (mx.float32, mx.bfloat16, mx.float16),
}


def spec_of(name: str, group: int = 32):
    """The format of a short name, such as `channel 4`."""
    kind, _, bits = name.partition(" ")
    if kind == "codebook":
        return CodebookSpec(int(bits), 42, unbiased=True)
    if kind == "plain":
        return PlainSpec()
    return {"token": AffineTokenSpec, "channel": AffineChannelSpec}[kind](int(bits), group)


def runs_of(name: str, rows: mx.array, group: int) -> list[Any]:
    """Rows as a store of whole blocks and, where the format has blocks, a rest as it is."""
    codec = codec_for(spec_of(name, group), rows.shape[-1])
    whole = rows.shape[2] // codec.spec.block * codec.spec.block
    runs: list[Any] = []
    if whole:
        runs.append(Store(codec, 128))
        runs[0].append(rows[:, :, :whole])
    if whole < rows.shape[2]:
        runs.append(Fresh(rows[:, :, whole:]))
    return runs


def mask_of(name: str, batch: int, length: int, total: int, key: mx.array) -> mx.array | str | None:
    """A mask in which every query sees a token at least: its own, the newest or the window's."""
    if name in ("none", "causal"):
        return None if name == "none" else name
    now, then = mx.arange(total - length, total)[:, None], mx.arange(total)[None]
    if name == "window":
        return (then <= now) & (then > now - 40)
    if name == "one row":
        return (mx.random.uniform(shape=(1, total), key=key) > 0.3) | (then == total - 1)
    if name == "bool":
        seen = mx.random.uniform(shape=(batch, 1, length, total), key=key) > 0.3
        return seen | (then == now)
    added = mx.random.normal((1, 1, length, total), key=key)
    return mx.where(then <= now, added, -mx.inf)


def both(q, keys, values, **call: Any) -> float:
    """Largest difference of the two routes over the same runs; the kernel must have been used."""
    taken: list[bool] = []
    compute = native.attend
    with patch.object(native, "attend", lambda *a, **k: taken.append(compute(*a, **k)) or taken[0]):
        compiled = attend(q, keys, values, use_kernels=True, **call)
    assert taken == [True], "the kernel was not called, or refused the shape"
    with patch.object(native, "library", lambda: None):
        reference = attend(q, keys, values, use_kernels=False, **call)
        mx.eval(reference)
    assert compiled.shape == reference.shape
    assert compiled.dtype == reference.dtype
    return mx.abs(compiled - reference).max().item()


def difference(*, keys, values, repeat, dim, tokens, batch, v_dim, length, mask, sinks, group,
               dtype, seed=0):  # fmt: skip
    """Largest difference for random rows: packed history, then `length` fresh rows."""
    key = mx.random.split(mx.random.key(seed), 6)
    total = tokens + length
    k = mx.random.normal((batch, HEADS, total, dim), key=key[0]).astype(dtype)
    v = mx.random.normal((batch, HEADS, total, v_dim), key=key[1]).astype(dtype)
    q = mx.random.normal((batch, HEADS * repeat, length, dim), key=key[2])
    return both(
        q,
        [*runs_of(keys, k[:, :, :tokens], group), Fresh(k[:, :, tokens:])],
        [*runs_of(values, v[:, :, :tokens], group), Fresh(v[:, :, tokens:])],
        n_kv=HEADS,
        v_dim=v_dim,
        scale=dim**-0.5,
        mask=mask_of(mask, batch, length, total, key[3]),
        sinks=mx.random.normal((HEADS * repeat,), key=key[4]) if sinks else None,
    )


# ---- a cover of all pairs -------------------------------------------------------------------


def pairs(case: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Every two settings of a case."""
    return combinations(((name, case[name]) for name in FACTORS), 2)


def every_pair() -> Iterator[tuple[Any, ...]]:
    """Every two settings that a cover holds."""
    for a, b in combinations(FACTORS, 2):
        yield from (((a, x), (b, y)) for x, y in product(FACTORS[a], FACTORS[b]))


def cover() -> list[dict[str, Any]]:
    """Few cases in which any two settings of any two factors meet, always the same ones.

    Greedy: start from a pair that is still missing, then take for each factor the setting that
    adds most missing pairs; among equals the first, which is the cheapest.
    """
    missing = dict.fromkeys(every_pair())
    cases = []
    order = list(FACTORS)
    while missing:
        case = dict(next(iter(missing)))
        for name in order:
            if name in case:
                continue

            def gain(value: Any, name: str = name, case: dict[str, Any] = case) -> int:
                new = 0
                for other, held in case.items():
                    two = ((other, held), (name, value))
                    new += (two if order.index(other) < order.index(name) else two[::-1]) in missing
                return new

            case[name] = max(FACTORS[name], key=gain)
        for pair in pairs(case):
            missing.pop(pair, None)
        cases.append({name: case[name] for name in order})
    return cases


CASES = cover()


def test_the_cover_holds_every_pair():
    seen = {pair for case in CASES for pair in pairs(case)}
    assert seen == set(every_pair())


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_routes_agree_on_a_pairwise_cover(case):
    assert difference(**case, seed=7) < CLOSE


@settings(max_examples=80, deadline=None)
@given(
    keys=st.sampled_from(KEYS),
    values=st.sampled_from(KEYS),
    repeat=st.integers(1, 8),
    dim=st.integers(1, 32).map(lambda n: 8 * n),
    v_dim=st.integers(1, 32).map(lambda n: 8 * n),
    tokens=st.integers(1, 700),
    batch=st.integers(1, 3),
    length=st.integers(1, 4),
    mask=st.sampled_from(FACTORS["mask"]),
    sinks=st.booleans(),
    group=st.sampled_from(FACTORS["group"]),
    dtype=st.sampled_from(FACTORS["dtype"]),
    seed=st.integers(0, 1 << 20),
)
def test_any_mix_of_formats_and_shapes_agrees(**case):
    assert difference(**case) < CLOSE


# ---- parts that add up ----------------------------------------------------------------------


class Sum:
    """A run whose rows are the sums of the rows of several runs."""

    def __init__(self, *parts: Any) -> None:
        self.parts, self.length = parts, parts[0].length

    def scores(self, q: mx.array) -> mx.array:
        return sum((p.scores(q) for p in self.parts[1:]), self.parts[0].scores(q))

    def mix(self, w: mx.array) -> mx.array:
        return sum((p.mix(w) for p in self.parts[1:]), self.parts[0].mix(w))

    def decode(self, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        rest = (p.decode(start, stop, dtype) for p in self.parts[1:])
        return sum(rest, self.parts[0].decode(start, stop, dtype))

    def native(self) -> tuple[native.NativeRun, ...]:
        return tuple(p.native() for p in self.parts)


class Projected(Fresh):
    """Rows coded in fewer channels than the head has: x = coded·Bᵀ."""

    def __init__(self, coded: mx.array, basis: mx.array) -> None:
        super().__init__(coded @ basis.T)
        self.coded, self.basis = coded, basis

    def rotate_query(self, q: mx.array) -> mx.array:
        return q @ self.basis

    def unrotate(self, x: mx.array) -> mx.array:
        return x @ self.basis.T

    def native(self) -> native.NativeRun:
        rank = self.coded.shape[-1]
        return native.NativeRun(
            native.PLAIN, self.coded, 0, self.length, rank, basis=self, dim=rank
        )


@pytest.mark.parametrize("repeat", [1, 8])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("codebook 3", "codebook 1"),
        ("channel 2", "token 4"),
        ("token 3", "channel 5"),
        ("token 4", "projected"),
        ("projected", "codebook 2"),
        ("channel 4", "plain"),
    ],
)
def test_parts_that_add_up_agree(first, second, repeat):
    dim, tokens, rank = 96, 256, 40
    key = mx.random.split(mx.random.key(3), 5)

    def part(name: str, at: int) -> Any:
        if name != "projected":
            return runs_of(name, mx.random.normal((2, HEADS, tokens, dim), key=key[at]), 32)[0]
        coded = mx.random.normal((2, HEADS, tokens, rank), key=key[at])
        return Projected(coded, mx.random.normal((dim, rank), key=key[2]) / dim**0.5)

    both_parts = Sum(part(first, 0), part(second, 1))
    fresh = Fresh(mx.random.normal((2, HEADS, 3, dim), key=key[3]))
    values = both_parts
    q = mx.random.normal((2, HEADS * repeat, 3, dim), key=key[4])
    call = {"n_kv": HEADS, "v_dim": dim, "scale": dim**-0.5, "mask": "causal"}
    assert both(q, [both_parts, fresh], [values, fresh], **call) < CLOSE
    assert both(q, [fresh, both_parts], [fresh, values], **call) < CLOSE


# ---- the whole grid -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("role", "name"),
    [*(("keys", name) for name in KEYS), *(("values", name) for name in KEYS)],
)
def test_routes_agree_on_the_whole_grid(role, name):
    for tokens, dim, batch in product(GRID["tokens"], GRID["dim"], GRID["batch"]):
        key = mx.random.split(mx.random.key(tokens + dim + batch), 3)
        plain = mx.random.normal((batch, HEADS, tokens, dim), key=key[0])
        packed = runs_of(name, mx.random.normal(plain.shape, key=key[1]), 32)
        runs = (packed, [Fresh(plain)]) if role == "keys" else ([Fresh(plain)], packed)
        for repeat in GRID["repeat"]:
            q = mx.random.normal((batch, HEADS * repeat, 1, dim), key=key[2])
            found = both(q, *runs, n_kv=HEADS, v_dim=dim, scale=dim**-0.5, mask=None)
            assert found < FAR, (tokens, dim, batch, repeat)


# ---- unpacking ------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize("name", KEYS)
def test_unpacked_rows_agree(name, dim):
    rows = mx.random.normal((2, HEADS, 384, dim), key=mx.random.key(dim))
    (store,) = runs_of(name, rows, 32)
    for start, stop in ((0, 384), (128, 300), (96, 257)):
        compiled = store.decode(start, stop, mx.float32)
        with patch.object(native, "library", lambda: None):
            reference = store.decode(start, stop, mx.float32)
            mx.eval(reference)
        assert compiled.shape == reference.shape
        assert mx.abs(compiled - reference).max().item() < CLOSE, (start, stop)


def test_unpacking_takes_the_kernel_from_its_threshold_on():
    (store,) = runs_of("token 4", mx.zeros((1, 1, 256, 64)), 32)
    least = dispatch.NATIVE_DECODE_TOKENS
    for tokens in (least - 1, least):
        with patch.object(store_module, "decode", wraps=native.decode) as used:
            store.decode(0, tokens, mx.float32)
        assert used.called == (tokens == least)
