import mlx.core as mx
import numpy as np
import pytest

from veloxquant.core.context import EncodedVector, QuantizationContext, TransformResult


def test_memory_bytes_sums_every_array_nested_parts_and_outlier_positions():
    inner = EncodedVector("scalar", 3, 6, indices=mx.zeros((3, 6), mx.uint8))
    outer = EncodedVector("scalar", 3, 2, indices=np.zeros((3, 2), np.uint16))
    whole = EncodedVector(
        "composite",
        3,
        8,
        norm=mx.zeros((3,), mx.bfloat16),
        angles=[mx.zeros((3, 4), mx.float16), mx.zeros((3, 2), mx.float32)],
        outlier_idx=np.arange(2),
        inlier_encoded=inner,
        outlier_encoded=outer,
    )
    assert whole.memory_bytes() == 18 + 12 + 6 + 24 + 24 + 16


def test_memory_bytes_counts_a_shared_array_once_and_an_empty_one_as_nothing():
    shared = np.zeros(10, np.float32)
    assert EncodedVector("x", 1, 1, norm=shared, residual_norm=shared).memory_bytes() == 40
    assert EncodedVector("x", 1, 1).memory_bytes() == 0


def test_memory_bytes_counts_bytes_and_numbers():
    assert EncodedVector("x", 1, 1, indices=b"abc", norm=0.5).memory_bytes() == 11


def test_memory_bytes_refuses_what_has_no_size():
    with pytest.raises(TypeError, match="size is unknown"):
        EncodedVector("x", 1, 1, indices=object()).memory_bytes()


def test_metadata_is_new_for_each_context():
    one, two = (QuantizationContext(None, "encode", None) for _ in range(2))
    one.metadata["scale"] = 2
    assert two.metadata == {}


def test_transform_result_has_the_documented_fields():
    result = TransformResult([1, 2], 3, n_levels=2)
    assert (result.angles, result.final_radius, result.n_levels) == ([1, 2], 3, 2)
