import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from veloxquant.artifacts import (
    Calibration,
    InMemoryArtifactStore,
    NpyArtifactStore,
    jl_matrix,
    rotation_matrix,
)
from veloxquant.core.abstractions import ArtifactStore
from veloxquant.core.exceptions import ArtifactNotFoundError, CodebookDimensionMismatch
from veloxquant.math.rotation import make_jl_matrix, make_rotation_matrix


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    if request.param == "memory":
        return InMemoryArtifactStore()
    return NpyArtifactStore(tmp_path / "artifacts")


def test_store_gives_back_what_was_saved(store: ArtifactStore) -> None:
    rotation, sketch = make_rotation_matrix(16, 3), make_jl_matrix(16, 24, 3)
    store.save_rotation_matrix(rotation, 16, 3)
    store.save_jl_matrix(mx.array(sketch.astype(np.float32)), 16, 24, 3)
    store.save_codebook([-1.0000001, 1 / 3], "gaussian", 1, 16)
    assert store.load_rotation_matrix(16, 3).dtype == mx.float16
    assert np.array_equal(np.array(store.load_rotation_matrix(16, 3)), rotation.astype(np.float16))
    assert store.load_jl_matrix(16, 24, 3).shape == (24, 16)
    book = store.load_codebook("gaussian", 1, 16)
    assert book.dtype == mx.float32
    assert book.tolist() == [np.float32(-1.0000001), np.float32(1 / 3)]


def test_store_saving_again_overwrites(store: ArtifactStore) -> None:
    store.save_codebook([-1, 1], "beta", 1, 8)
    store.save_codebook([-2, 2], "beta", 1, 8)
    assert store.load_codebook("beta", 1, 8).tolist() == [-2, 2]


def test_store_names_keep_artifacts_apart(store: ArtifactStore) -> None:
    store.save_rotation_matrix(np.eye(4), 4, 1)
    assert store.exists("rotation", d=4, seed=1)
    assert not store.exists("rotation", d=4, seed=2)
    assert not store.exists("jl", d=4, m=4, seed=1)
    with pytest.raises(ArtifactNotFoundError, match="rotation_d4_seed2"):
        store.load_rotation_matrix(4, 2)
    with pytest.raises(FileNotFoundError):
        store.load_codebook("gaussian", 2, 4)
    with pytest.raises(ArtifactNotFoundError):
        store.load_jl_matrix(4, 4, 1)


def test_store_refuses_other_shapes_and_kinds(store: ArtifactStore) -> None:
    with pytest.raises(CodebookDimensionMismatch, match="shape"):
        store.save_codebook([1, 2, 3], "gaussian", 2, 8)
    with pytest.raises(ValueError, match="should be"):
        store.save_rotation_matrix(np.eye(3), 4, 1)
    with pytest.raises(ValueError, match="artifact type"):
        store.exists("matrix", d=4)
    with pytest.raises(ValueError, match="named by"):
        store.exists("rotation", d=4)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a..b", "x\0y", 3])
def test_store_refuses_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    store = NpyArtifactStore(tmp_path / "a")
    with pytest.raises(ValueError, match="cannot name a file"):
        store.save_codebook([0, 1], name, 1, 8)
    with pytest.raises(ValueError, match="cannot name a file"):
        store.calibration_file("model", name)
    assert not (tmp_path / "a").exists()


def test_files_have_documented_names_and_follow_the_umask(tmp_path: Path) -> None:
    store = NpyArtifactStore(tmp_path)
    before = os.umask(0o022)
    try:
        store.save_rotation_matrix(np.eye(4), 4, 7)
        store.save_jl_matrix(np.ones((2, 4)), 4, 2, 7)
        store.save_codebook([0, 1], "gaussian", 1, 4)
    finally:
        os.umask(before)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["codebook_gaussian_b1_d4.npy", "jl_d4_m2_seed7.npy", "rotation_d4_seed7.npy"]
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_files_are_never_seen_half_written(tmp_path: Path) -> None:
    store = NpyArtifactStore(tmp_path)
    store.save_rotation_matrix(np.eye(64), 64, 1)
    errors: list[BaseException] = []

    def run(act: Callable[[], object]) -> None:
        try:
            for _ in range(30):
                act()
        except BaseException as error:  # collected and asserted on below
            errors.append(error)

    acts = [lambda: store.save_rotation_matrix(np.eye(64), 64, 1)] * 2
    acts.append(lambda: store.load_rotation_matrix(64, 1))
    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert [p.name for p in tmp_path.iterdir()] == ["rotation_d64_seed1.npy"]


def test_damaged_and_foreign_files_count_as_missing(tmp_path: Path) -> None:
    store = NpyArtifactStore(tmp_path)
    path = tmp_path / "rotation_d4_seed1.npy"
    path.write_bytes(b"\x93NUMPY, not quite")
    assert not store.exists("rotation", d=4, seed=1)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert not store.exists("rotation", d=4, seed=1)
    np.save(path, np.eye(5))
    assert not store.exists("rotation", d=4, seed=1)
    with pytest.raises(ValueError, match="shape"):
        store.load_rotation_matrix(4, 1)


def test_warm_and_cold_runs_give_the_same_matrices(store: ArtifactStore) -> None:
    cold = rotation_matrix(32, 5, store), jl_matrix(32, 16, 5, store)
    store.save_rotation_matrix(make_rotation_matrix(32, 5), 32, 5)
    store.save_jl_matrix(make_jl_matrix(32, 16, 5), 32, 16, 5)
    warm = rotation_matrix(32, 5, store), jl_matrix(32, 16, 5, store)
    for a, b in zip(cold, warm, strict=True):
        assert mx.array_equal(a, b)
    assert mx.abs(warm[0] @ warm[0].T - mx.eye(32)).max() < 1e-5


def test_rotation_comes_from_the_store_when_it_is_there() -> None:
    store = InMemoryArtifactStore()
    store.save_rotation_matrix(np.eye(8), 8, 5)
    assert mx.array_equal(rotation_matrix(8, 5, store), mx.eye(8))


def test_calibration_comes_back_whole(store: NpyArtifactStore) -> None:
    layers = [{"basis": mx.eye(3), "bits": np.arange(3)}, {"basis": mx.zeros((3, 3)), "k": np.e}]
    made = Calibration(layers, {"book": mx.ones((2, 2))}, {"model": "x", "fields": {"a": 1}})
    assert store.load_calibration("m1", "vecinfer") is None
    store.save_calibration("m1", "vecinfer", made)
    found = store.load_calibration("m1", "vecinfer")
    assert found is not None
    assert found.meta == made.meta
    assert store.load_calibration("m2", "vecinfer") is None
    assert store.load_calibration("m1", "kvtc") is None
    assert set(found.layers[1]) == {"basis", "k"}
    assert np.allclose(np.array(found.layers[0]["basis"]), np.eye(3))
    assert np.array(found.layers[0]["bits"]).tolist() == [0, 1, 2]
    assert np.array(found.shared["book"]).shape == (2, 2)


def test_damaged_calibration_counts_as_missing(tmp_path: Path) -> None:
    store = NpyArtifactStore(tmp_path)
    store.save_calibration("m", "kvtc", Calibration([{"a": np.ones(3)}]))
    path = store.calibration_file("m", "kvtc")
    path.write_bytes(path.read_bytes()[:100])
    assert store.load_calibration("m", "kvtc") is None


def test_calibration_holds_numbers_only(tmp_path: Path) -> None:
    store = NpyArtifactStore(tmp_path)
    with pytest.raises(ValueError, match="give numbers"):
        store.save_calibration("m", "kvtc", Calibration([{"a": np.array(["x"])}]))
    with pytest.raises(ValueError, match="plain name"):
        store.save_calibration("m", "kvtc", Calibration([{"a/b": np.ones(2)}]))
