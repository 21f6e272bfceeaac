"""The documented rules of thumb: memory first, then length; every choice can be built."""

import mlx.core as mx
import pytest

from veloxquant.cache.builder import KVCacheFactory
from veloxquant.config.auto_config import (
    LONG_CONTEXT_TOKENS,
    SHORT_CONTEXT_TOKENS,
    HardwareInfo,
    WorkloadSpec,
    detect_hardware_info,
    select_kv_cache_config,
)

GIB = 1 << 30
ROOMY = HardwareInfo(64 * GIB)


@pytest.mark.parametrize(
    ("tokens", "method", "field", "bits"),
    [
        (SHORT_CONTEXT_TOKENS - 1, "turboquant_rvq", "bit_width_inlier", 4),
        (SHORT_CONTEXT_TOKENS, "kivi", "bit_width_inlier", 2),
        (LONG_CONTEXT_TOKENS - 1, "kivi", "bit_width_inlier", 2),
        (LONG_CONTEXT_TOKENS, "kvquant", "kvquant_bits", 3),
    ],
)
def test_length_decides_where_memory_is_no_matter(
    tokens: int, method: str, field: str, bits: int
) -> None:
    for machine in (ROOMY, HardwareInfo()):
        made = select_kv_cache_config(WorkloadSpec(seq_len=tokens), machine)
        assert made.config.method == method
        assert getattr(made.config, field) == bits
        assert method in made.reason
        assert KVCacheFactory.create(made.config).nbytes == 0


def test_memory_decides_from_three_quarters_on() -> None:
    work = WorkloadSpec(head_dim=64, seq_len=1024, n_layers=4, batch_size=3, n_kv_heads=2)
    assert work.fp16_kv_bytes() == 4 * 64 * 1024 * 4 * 3 * 2
    cache = work.fp16_kv_bytes()
    full = HardwareInfo(4 * cache, 2 * cache)
    assert full.pressure_fraction(cache) == 0.75
    assert HardwareInfo().pressure_fraction(cache) is None
    made = select_kv_cache_config(work, full)
    assert (made.config.method, made.config.gear_bits) == ("gear", 2)
    assert "75%" in made.reason
    below = HardwareInfo(4 * cache, 2 * cache - 1)
    assert select_kv_cache_config(work, below).config.method == "turboquant_rvq"


@pytest.mark.parametrize(("dim", "group"), [(128, 32), (256, 64)])
def test_large_heads_have_larger_groups(dim: int, group: int) -> None:
    for tokens, field in ((4096, "kivi_group_size"), (20_000, "kvquant_group_size")):
        made = select_kv_cache_config(WorkloadSpec(head_dim=dim, seq_len=tokens), ROOMY)
        assert getattr(made.config, field) == group
    tight = select_kv_cache_config(WorkloadSpec(head_dim=dim), HardwareInfo(1))
    assert tight.config.gear_group_size == group


def test_this_machine_is_known() -> None:
    held = mx.ones((1 << 18,))
    mx.eval(held)
    info = detect_hardware_info()
    assert info.total_memory_bytes is not None
    assert info.total_memory_bytes > info.active_memory_bytes >= held.nbytes
    assert select_kv_cache_config(WorkloadSpec()).config.head_dim == 128
