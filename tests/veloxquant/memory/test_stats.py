import re

import pytest

from veloxquant.memory import AllocationStats, BlockPoolAllocator, PoolConfig

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*) (\d+(?:\.\d+)?)")


def parse(text):
    """Name to (type, value), checking the rules of the text format on the way."""
    assert text.endswith("\n")
    lines = text.splitlines()
    found = {}
    for help_line, type_line, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, value = SAMPLE.fullmatch(sample).groups()
        assert re.fullmatch(rf"# HELP {name} \S.*", help_line)
        kind = re.fullmatch(rf"# TYPE {name} (counter|gauge)", type_line).group(1)
        assert name.endswith("_total") == (kind == "counter")
        assert name not in found
        found[name] = (kind, float(value))
    return found


def test_prometheus_text_is_valid_and_has_every_counter():
    pool = BlockPoolAllocator(PoolConfig(block_size=4, n_blocks=3, separate_kv=False))
    pool.allocate("kv", 5, 1)
    found = parse(pool.stats.to_prometheus())
    values = {name.removeprefix("veloxquant_block_pool_"): v for name, (_, v) in found.items()}
    assert values == {
        "blocks": 3,
        "blocks_in_use": 2,
        "peak_blocks_in_use": 2,
        "fragmentation_ratio": pytest.approx(1 / 3),
        "allocations_total": 1,
        "frees_total": 0,
        "reused_total": 0,
        "exhausted_total": 0,
        "grown_total": 0,
        "retired_total": 0,
    }


def test_prometheus_prefix_is_used_and_checked():
    assert "my_pool_blocks" in parse(AllocationStats(1).to_prometheus("my_pool"))
    for bad in ("", "9lives", "a b", "a\nb"):
        with pytest.raises(ValueError, match="prefix"):
            AllocationStats(1).to_prometheus(bad)


def test_snapshot_is_independent():
    stats = AllocationStats(n_blocks=4, n_allocations=2)
    copy = stats.snapshot()
    stats.n_allocations = 9
    assert copy.n_allocations == 2
    assert AllocationStats(0).fragmentation() == 0.0
