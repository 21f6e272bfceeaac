import inspect
import subprocess
import sys

import pytest

from veloxquant.core import abstractions
from veloxquant.core.abstractions import KVCache, QuantizationHandler
from veloxquant.core.context import QuantizationContext

ABSTRACT = {
    "Quantizer": {"encode", "decode", "estimate_inner_product"},
    "Preconditioner": {"apply", "apply_inverse"},
    "Codebook": {"quantize", "dequantize"},
    "KVCache": {"append_key", "append_value", "attend", "memory_bytes"},
    "Transform": {"forward", "inverse"},
    "QuantizationHandler": {"handle"},
    "InnerProductStrategy": {"estimate"},
    "CodebookStrategy": {"compute_centroids"},
    "ArtifactStore": {
        "load_rotation_matrix",
        "save_rotation_matrix",
        "load_codebook",
        "save_codebook",
        "load_jl_matrix",
        "save_jl_matrix",
        "exists",
    },
    "QuantizationObserver": {"on_event"},
}


@pytest.mark.parametrize("name", ABSTRACT)
def test_interface_demands_exactly_the_documented_methods(name):
    cls = getattr(abstractions, name)
    assert cls.__abstractmethods__ == ABSTRACT[name]
    with pytest.raises(TypeError, match="abstract"):
        cls()


def test_no_other_interface_is_defined():
    found = {
        name
        for name, cls in inspect.getmembers(abstractions, inspect.isclass)
        if cls.__module__ == abstractions.__name__
    }
    assert found == set(ABSTRACT)


class Pairs(KVCache):
    def __init__(self):
        self.log = []

    def append_key(self, k):
        self.log.append(("k", k))

    def append_value(self, v):
        self.log.append(("v", v))

    def attend(self, q):
        return q

    def memory_bytes(self):
        return 0


def test_append_feeds_key_then_value():
    cache = Pairs()
    cache.append(1, 2)
    assert cache.log == [("k", 1), ("v", 2)]


def test_cache_without_reset_or_length_says_so_and_is_still_true():
    cache = Pairs()
    assert cache
    with pytest.raises(NotImplementedError, match="Pairs cannot be emptied"):
        cache.reset()
    with pytest.raises(NotImplementedError, match="does not count"):
        len(cache)


class Note(QuantizationHandler):
    def handle(self, ctx):
        ctx.metadata.setdefault("seen", []).append(id(self))
        return self._pass_on(ctx)


def test_handlers_chain_in_order_and_apart_from_other_chains():
    first, second, other = Note(), Note(), Note()
    assert first.set_next(second) is second
    ctx = first.handle(QuantizationContext(None, "encode", None))
    assert ctx.metadata["seen"] == [id(first), id(second)]
    assert other.handle(QuantizationContext(None, "encode", None)).metadata["seen"] == [id(other)]
    assert first.handler_name == "Note"


def test_core_and_pool_do_not_load_mlx():
    code = (
        "import sys, veloxquant.core.abstractions, veloxquant.memory as m;"
        "m.BlockPoolAllocator(); m.PooledKVCache; m.Lease;"
        "assert not {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules), 'loaded too early'"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=30)
