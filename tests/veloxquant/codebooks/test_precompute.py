from pathlib import Path

import numpy as np
import pytest

from veloxquant.artifacts import NpyArtifactStore
from veloxquant.codebooks.precompute import precompute
from veloxquant.core.exceptions import QuantizerConfigError
from veloxquant.quantizers.factory import QuantizerFactory


def test_precompute_writes_everything_named(tmp_path: Path) -> None:
    precompute(16, [1, 2], 24, 3, str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "rotation_d16_seed3.npy", "jl_d16_m24_seed3.npy",
        "codebook_gaussian_b1_d16.npy", "codebook_gaussian_b2_d16.npy",
        "codebook_beta_b1_d16.npy", "codebook_beta_b2_d16.npy",
    }  # fmt: skip


def test_precompute_refuses_before_it_writes(tmp_path: Path) -> None:
    with pytest.raises(QuantizerConfigError):
        precompute(16, [2, 12], 16, 3, str(tmp_path / "a"))
    with pytest.raises(QuantizerConfigError):
        precompute(0, [2], 16, 3, str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 10**11), ("head_dim", 4097), ("head_dim", 16.0), ("jl_dim", 10**11),
        ("jl_dim", 0), ("seed", -1), ("seed", 1 << 64), ("seed", 1.5), ("seed", True),
    ],
)  # fmt: skip
def test_numbers_that_make_no_matrix_are_refused_by_name(
    field: str, value: int, tmp_path: Path
) -> None:
    given = {"head_dim": 16, "jl_dim": 16, "seed": 3} | {field: value}
    with pytest.raises(QuantizerConfigError, match=rf"{field}=.* integer from [01] to \d+$"):
        precompute(bits=[2], output_dir=str(tmp_path / "a"), **given)
    assert not (tmp_path / "a").exists()


def test_quantizers_are_the_same_with_and_without_the_files(tmp_path: Path) -> None:
    precompute(32, [1, 2, 3], 32, 5, str(tmp_path))
    x = np.random.default_rng(0).standard_normal((9, 32)).astype(np.float32)
    for name in ("turboquant_mse", "turboquant_prod", "qjl"):
        store = NpyArtifactStore(tmp_path)
        warm, cold = (QuantizerFactory.create(name, 32, 3, seed=5, store=s) for s in (store, None))
        assert np.array_equal(np.array(warm.decode(warm.encode(x))), cold.decode(cold.encode(x)))
