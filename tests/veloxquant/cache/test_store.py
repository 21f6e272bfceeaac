"""A store against a plain list of tokens, under random sequences of operations."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.cache.store import Store
from veloxquant.quantizers.codecs import codec_for
from veloxquant.quantizers.sizes import CodecSpec
from veloxquant.quantizers.specs.affine import AffineChannelSpec, AffineTokenSpec
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.specs.plain import PlainSpec

DIM, STEP = 32, 32
SPECS: list[CodecSpec] = [
    PlainSpec(),
    AffineTokenSpec(4, 32),
    CodebookSpec(2, 1, unbiased=False),
    CodebookSpec(3, 1, unbiased=True),
    AffineChannelSpec(2, 32),
]


def rows(n: int, seed: int) -> mx.array:
    return mx.random.normal((2, 2, n, DIM), key=mx.random.key(seed))


class Model:
    """What the store should hold: decoded tokens, each coded alone or in its block."""

    def __init__(self, spec: CodecSpec) -> None:
        self.spec, self.codec = spec, codec_for(spec, DIM)
        self.tokens = np.zeros((2, 2, 0, DIM), dtype=np.float32)

    def append(self, x: mx.array) -> None:
        new = np.array(self.codec.decode(self.codec.encode(x), mx.float32))
        self.tokens = np.concatenate([self.tokens, new], axis=2)

    def check(self, store: Store) -> None:
        n = self.tokens.shape[2]
        assert store.length == n
        assert store.length <= store.capacity or n == 0
        if n == 0:
            assert store.nbytes == 0
            assert not list(store.arrays())
            return
        assert store.nbytes == 4 * self.spec.nbytes(store.capacity, DIM, 4)
        got = store.decode(0, n, mx.float32)
        assert np.abs(np.array(got) - self.tokens).max() < 1e-5
        low, high = n // 3, n - n // 4
        part = np.array(store.decode(low, high, mx.float32))
        assert np.abs(part - self.tokens[:, :, low:high]).max(initial=0) < 1e-5
        q = np.array(rows(3, 1))
        scores = np.array(store.scores(mx.array(q)))
        assert np.abs(scores - q @ self.tokens.swapaxes(-1, -2)).max() < 1e-3
        w = np.random.default_rng(0).random((2, 2, 3, n)).astype(np.float32)
        mixed = np.array(store.mix(mx.array(w)))
        assert np.abs(mixed - w @ self.tokens).max() < 1e-3 * max(1, n)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "trim", "front", "take", "copy", "compact"]),
        st.integers(0, 70),
    ),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=50)
@given(spec=st.sampled_from(SPECS), operations=OPERATIONS)
def test_random_operations(spec: CodecSpec, operations: list[tuple[str, int]]) -> None:
    store, model = Store(codec_for(spec, DIM), STEP), Model(spec)
    for seed, (what, n) in enumerate(operations):
        have = model.tokens.shape[2]
        if what == "append":
            n = n // spec.block * spec.block
            x = rows(n, seed)
            store.append(x)
            if n:
                model.append(x)
        elif what == "trim":
            n = min(n // spec.block * spec.block, have)
            assert store.trim(n) == n
            model.tokens = model.tokens[:, :, : have - n]
        elif what == "front" and spec.block == 1:
            n = min(n, have)
            store.drop_front(n)
            model.tokens = model.tokens[:, :, n:]
        elif what == "take" and spec.token_local:
            n = min(n, have)
            draw = np.random.default_rng(seed)
            kept = np.stack([np.sort(draw.permutation(have)[:n]) for _ in range(4)])
            kept = kept.reshape(2, 2, n)
            store.take(mx.array(kept.astype(np.int32)))
            model.tokens = np.take_along_axis(model.tokens, kept[..., None], axis=2)
        elif what in ("copy", "compact"):
            saved = store.live if what == "copy" else store.compact()
            twin = Store(codec_for(spec, DIM), STEP)
            twin.adopt(saved)
            store.append(rows(spec.block, 99))  # the old store goes on alone
            store = twin
        model.check(store)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.describe())
def test_capacity_follows_the_tokens(spec: CodecSpec) -> None:
    store = Store(codec_for(spec, DIM), STEP)
    store.append(rows(96, 0))
    assert store.capacity == 96
    store.append(rows(spec.block, 1))
    assert store.capacity == 128
    store.trim(64)
    assert store.capacity == 64
    store.trim(1_000_000 if spec.block == 1 else store.length)
    assert store.capacity == store.nbytes == 0


def test_tokens_that_share_scales_cannot_be_picked() -> None:
    store = Store(codec_for(AffineChannelSpec(2, 32), DIM), STEP)
    store.append(rows(32, 0))
    with pytest.raises(TypeError, match="affine_channel"):
        store.take(mx.zeros((2, 2, 1), dtype=mx.int32))


def test_a_buffer_never_is_a_slice_of_something_longer() -> None:
    long = rows(4_096, 0)
    mx.eval(long)
    store = Store(codec_for(PlainSpec(), DIM), STEP)
    before = mx.get_active_memory()
    store.append(long[:, :, :32])
    mx.eval(list(store.arrays()))
    freed = long.nbytes
    del long
    assert mx.get_active_memory() - before <= store.nbytes - freed + (64 << 10)
