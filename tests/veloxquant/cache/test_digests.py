"""Codes are never read with other codebooks, smooth factors or rotations than their own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cache_lab import Tokens, attend, held_rows, plan_of, random_tokens, same, shape_of

from veloxquant.artifacts import NpyArtifactStore
from veloxquant.cache.builder import new_caches
from veloxquant.cache.digests import array_digest, constants_of
from veloxquant.cache.persist import load_caches, save_caches
from veloxquant.cache.probe import ModelPlan
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.config.options import A2ATSOptions, VecInferOptions
from veloxquant.core.exceptions import CacheStateError
from veloxquant.quantizers.specs.codebook import CodebookSpec
from veloxquant.quantizers.stored import codec_with

LAYERS = 2


def drawn(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def vecinfer(**fields: Any) -> KVCacheConfig:
    small = VecInferOptions(key_codebook_bits=4, value_codebook_bits=4)
    given = {"key_codebook": drawn(16, 4, seed=1), "value_codebook": drawn(16, 8, seed=2)} | fields
    return KVCacheConfig(method="vecinfer", head_dim=64, options=small, **given)


def a2ats(**fields: Any) -> KVCacheConfig:
    given = {f"a2ats_{name}": value for name, value in fields.items()}
    options = A2ATSOptions(a2ats_window=16, a2ats_codebook_bits=4, **given)
    return KVCacheConfig(method="a2ats", head_dim=64, options=options)


class Saved:
    """A file of small caches."""

    def __init__(
        self, folder: Path, config: KVCacheConfig, artifacts: list[Mapping[str, Any]] | None = None
    ) -> None:
        self.tokens: Tokens = random_tokens(100, dtype=mx.float16)
        self.plan: ModelPlan = plan_of(shape_of(self.tokens), LAYERS)
        self.plan.artifacts = artifacts or []
        self.caches = new_caches(self.plan, config)
        for cache in self.caches:
            mx.eval(attend(cache, self.tokens))
        self.file = folder / "cache.safetensors"
        save_caches(self.file, self.caches, config)

    def load(
        self, config: KVCacheConfig, artifacts: list[Mapping[str, Any]] | None = None
    ) -> list[Any]:
        given = self.plan.artifacts if artifacts is None else artifacts
        return load_caches(self.file, replace(self.plan, artifacts=given), config)

    def refused(
        self, config: KVCacheConfig, words: str, artifacts: list[Mapping[str, Any]] | None = None
    ) -> None:
        with pytest.raises(CacheStateError, match=words) as caught:
            self.load(config, artifacts)
        assert self.file.name in str(caught.value)

    def check_same(self, loaded: list[Any]) -> None:
        for mine, other in zip(self.caches, loaded, strict=True):
            assert same(held_rows(mine)[0], held_rows(other)[0])


def test_a_digest_covers_values_shape_and_type() -> None:
    a = drawn(4, 6, seed=1)
    assert array_digest(a) == array_digest(np.array(a)) == array_digest(a.T.T)
    others = [
        a.T,
        a.reshape(6, 4),
        a.astype(mx.bfloat16),
        a + 1,
        a.astype(mx.float16),
        a[0],
        a[0, 0],
    ]
    assert len({array_digest(x) for x in (a, *others)}) == 8


def test_codebooks_of_the_configuration(tmp_path: Path) -> None:
    saved = Saved(tmp_path, vecinfer())
    saved.check_same(saved.load(vecinfer()))
    saved.refused(vecinfer(key_codebook=drawn(16, 4, seed=3)), "key_codebook of sha256")
    saved.refused(vecinfer(value_codebook=None), "asked for no value_codebook")
    saved.refused(vecinfer(smooth_factors=mx.arange(1, 65) / 8), "no smooth_factors")
    other = Saved(tmp_path, vecinfer(smooth_factors=mx.arange(1, 65) / 8))
    other.refused(vecinfer(), "smooth_factors of sha256")


def test_a2ats_arrays_of_the_configuration(tmp_path: Path) -> None:
    book = drawn(16, a2ats().a2ats_sub_dim, seed=1)
    saved = Saved(tmp_path, a2ats(codebook=book))
    saved.check_same(saved.load(a2ats(codebook=book + 0)))
    saved.refused(a2ats(codebook=-book), "a2ats_codebook of sha256")
    saved.refused(a2ats(), "asked for no a2ats_codebook")
    saved.refused(a2ats(codebook=book, query_h=mx.eye(64)), "no a2ats_query_h")


def eigenbases(seed: int) -> dict[str, mx.array]:
    q = np.linalg.qr(np.array(drawn(2, 64, 64, seed=seed)))[0]
    variances = mx.broadcast_to(mx.exp(-mx.arange(64) / 8), (2, 64))
    variances = variances / variances.sum(axis=-1, keepdims=True)
    return {
        f"{side}_{name}": a
        for side in ("key", "value")
        for name, a in (("vectors", mx.array(q)), ("variances", variances))
    }


@pytest.mark.parametrize("method", ["spectral", "vecinfer", "a2ats"])
def test_artifacts_of_a_calibration(method: str, tmp_path: Path) -> None:
    if method == "spectral":
        config = KVCacheConfig(method="spectral", head_dim=64)
        one, two = eigenbases(1), eigenbases(2)
    elif method == "vecinfer":
        config = vecinfer(key_codebook=None, value_codebook=None)
        one = {"key_codebook": drawn(16, 4, seed=1), "value_codebook": drawn(16, 8, seed=2)}
        two = one | {"key_codebook": drawn(16, 4, seed=3)}
    else:
        config = a2ats()
        one, two = ({"a2ats_codebook": drawn(16, config.a2ats_sub_dim, seed=i)} for i in (1, 2))
    saved = Saved(tmp_path, config, [one, one])
    assert len(set(constants_of(saved.caches))) == 1
    saved.check_same(saved.load(config, [{k: a + 0 for k, a in one.items()}] * 2))
    words = "another calibration of compressed layer"
    saved.refused(config, f"{words} 0", [two, two])
    saved.refused(config, f"{words} 1", [one, two])
    plain = Saved(tmp_path, config)
    plain.refused(config, words, [one, one])
    plain.check_same(plain.load(config))


def test_constants_that_follow_from_the_seed_need_no_digest() -> None:
    tokens = random_tokens(8)
    for method in ("turboquant_rvq", "polar", "spectral", "vecinfer", "nsnquant", "fp16"):
        config = KVCacheConfig(method=method, head_dim=64)
        caches = new_caches(plan_of(shape_of(tokens), 1), config)
        assert not any(constants_of(caches))


def test_matrices_of_a_store_have_a_digest(tmp_path: Path) -> None:
    store = NpyArtifactStore(tmp_path)
    spec = CodebookSpec(2, 42, unbiased=False)
    assert codec_with(store, spec, 64).foreign == ()
    store.save_rotation_matrix(mx.eye(64), d=64, seed=42)
    (matrix,) = codec_with(store, spec, 64).foreign
    assert matrix.shape == (64, 64)
