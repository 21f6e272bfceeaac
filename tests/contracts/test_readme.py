"""The README's table of methods: every method once, with the size that the caches have."""

import re
from pathlib import Path

import pytest

from veloxquant.cache.table import TABLE, held
from veloxquant.config.kv_cache import BASELINE, KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

README = Path(__file__).parents[2] / "README.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| ([\d.]+)x \|$", re.MULTILINE)
SHAPE = LayerShape(32, 8, 128, 128, 2)
ROWS = ROW.findall(README.read_text("utf-8"))


def test_every_method_has_a_line_with_its_blurb() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(set(TABLE) - {BASELINE})
    for name, blurb, _ in ROWS:
        assert blurb == TABLE[name].blurb


@pytest.mark.parametrize(("name", "said"), [(name, float(size)) for name, _, size in ROWS])
def test_sizes_are_those_of_the_caches(name: str, said: float) -> None:
    nbytes = held(KVCacheConfig(method=name), SHAPE, 4_096).nbytes
    assert SHAPE.full_bytes(4_096) / nbytes == pytest.approx(said, rel=0.01)
