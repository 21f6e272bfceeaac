import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import make_tiny_model

from veloxquant.artifacts import NpyArtifactStore
from veloxquant.cli import exit_codes
from veloxquant.cli.precompute import tail_tokens

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--set", "key_codebook_bits=3", "--set", "value_codebook_bits=3")


@pytest.fixture
def tiny(home: Path) -> Path:
    """A model of random weights among the user's own."""
    return make_tiny_model(home / "data" / "models" / "Tiny-2L")


def test_a_model_is_fitted_and_found_again(run: Run, tiny: Path, home: Path) -> None:
    code, out, err = run(
        "precompute", "Tiny-2L", "--method", "vecinfer", "--tokens", "512", *SMALL, "--json"
    )
    assert code == exit_codes.OK, err
    data = json.loads(out)["data"]
    (row,) = data["calibrations"]
    assert (row["method"], row["layers"]) == ("vecinfer", 2)
    assert "smooth_factors" in row["arrays"]
    assert len(data["layer_bits"]) == 2
    assert Path(row["folder"]).is_relative_to(home / "data" / "artifacts" / "calibration")

    from mlx_lm.utils import load_model

    from veloxquant.cache.builder import KVCacheBuilder, plan_model
    from veloxquant.planning.method_settings import config_of

    model, _ = load_model(tiny)
    given = {"key_codebook_bits": 3, "value_codebook_bits": 3}
    config = config_of("vecinfer", given, 64)
    assert len(plan_model(model, config).artifacts) == 2
    assert all(cache.calibrated for cache in KVCacheBuilder.for_model(model, config))

    from veloxquant.worker.caches import plan_for
    from veloxquant.worker.calibrated import words

    told = words(plan_for(model, config), "Tiny-2L", given)
    assert re.fullmatch(r"fitted \d{4}-\d\d-\d\d, 2 layers", told)
    other = plan_for(model, config_of("vecinfer", {}, 64))
    assert words(other, "Tiny-2L", {}).startswith("none; `vq precompute Tiny-2L")
    assert "not used" in other.warnings[0]


def test_a_text_of_the_user_is_read(run: Run, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A line of words that somebody wrote.\n" * 60)
    words = ("precompute", "Tiny-2L", "--method", "ratequant", "--text", str(text))
    code, out, err = run(*words)
    assert code == exit_codes.OK, err
    assert "ratequant" in out
    assert "bit_width_inlier=" in err
    text.write_bytes(b"\xff\xfe\xff")
    assert run(*words)[0] == exit_codes.FAILED
    assert run(*words[:-1], str(tmp_path / "no.txt"))[0] == exit_codes.NOT_FOUND


def test_what_cannot_be_fitted_is_said_before_a_model_is_read(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr("veloxquant.cli.precompute._load", refuse)
    code, _, err = run("precompute", "Tiny-2L", "--method", "kivi")
    assert code == exit_codes.UNSUPPORTED
    assert "fits nothing" in err
    code, _, err = run("precompute", "Tiny-2L", "--tokens", "511")
    assert code == exit_codes.USAGE
    assert "at least 512" in err
    wide = ("--method", "skvq", "--set", "skvq_window=1000")
    code, _, err = run("precompute", "Tiny-2L", *wide, "--tokens", "1000")
    assert code == exit_codes.USAGE
    assert "at least 1034" in err
    text = tmp_path / "text.txt"
    text.write_text("short")
    code, _, err = run("precompute", "Tiny-2L", "--text", str(text))
    assert code == exit_codes.FAILED
    assert "at least 512 are needed" in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("tiny")
def test_the_shortest_text_that_is_taken_fits_what_counts_tokens(run: Run) -> None:
    names = ("amc", "kvquant", "kvtc", "skvq")
    words = [word for name in names for word in ("--method", name)]
    code, out, err = run("precompute", "Tiny-2L", "--tokens", "512", *words, "--json")
    assert code == exit_codes.OK, err
    assert [row["method"] for row in json.loads(out)["data"]["calibrations"]] == list(names)


def test_what_cannot_be_read_is_said(run: Run, tiny: Path) -> None:
    assert run("precompute", "nope", "--method", "vecinfer")[0] == exit_codes.NOT_FOUND
    assert run("precompute", "Tiny-2L", "--method", "vecinferr")[0] == exit_codes.NOT_FOUND
    assert run("precompute", "Tiny-2L", "--set", "key_sub_dim=4")[0] == exit_codes.USAGE
    assert (
        run("precompute", "Tiny-2L", "--method", "vecinfer", "--set", "x=4")[0] == exit_codes.USAGE
    )
    (tiny / "model.safetensors").write_bytes(b"no")
    assert run("precompute", "Tiny-2L", "--method", "vecinfer")[0] != exit_codes.OK


def test_without_a_model_matrices_are_written(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("precompute", "--head_dim", "16", "--jl_dim", "24", "--bits", "1", "2", "--seed", "5")
    code, out, _ = run(*words, "--output_dir", str(folder))
    assert code == exit_codes.OK
    assert out.splitlines() == sorted(path.name for path in folder.iterdir())
    store = NpyArtifactStore(folder)
    assert store.load_jl_matrix(16, 24, 5).shape == (24, 16)
    assert np.array(store.load_codebook("beta", 2, 16)).shape == (4,)
    data = json.loads(run(*words, "--output_dir", str(folder), "--json")[1])["data"]
    assert len(data["files"]) == 6


def test_matrices_out_of_range_are_refused(run: Run, tmp_path: Path) -> None:
    folder = ("--output_dir", str(tmp_path / "out"))
    code, _, err = run("precompute", "--head_dim", "16", "--bits", "9", *folder)
    assert code == exit_codes.USAGE
    assert "1 to 8 bits" in err
    for words in (("--seed", "-1"), ("--head_dim", "100000000000"), ("--jl_dim", "100000000000")):
        code, _, err = run("precompute", *words, *folder)
        assert code == exit_codes.USAGE
        assert f"{words[0][2:]}={words[1]} is not possible" in err
    assert run("precompute", "--method", "vecinfer", *folder)[0] == exit_codes.USAGE
    assert not (tmp_path / "out").exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    words = ("precompute", "--head_dim", "8", "--bits", "1", "--output_dir", str(blocked))
    code, _, err = run(*words)
    assert code == exit_codes.FAILED
    assert "another folder" in err


def test_the_end_of_a_text_is_taken_in_order() -> None:
    text = "".join(f"{i}\n" for i in range(1000)) + "x" * 9000
    tokens = tail_tokens(lambda piece: list(piece.encode()), text, 9010)
    assert bytes(tokens).decode() == text[-9010:]
    assert tail_tokens(lambda piece: list(piece.encode()), "ab", 10) == [97, 98]


def test_documented_entry_points_run_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from veloxquant.cli.precompute import main as command
    from veloxquant.codebooks.precompute import main as module

    for number, entry in enumerate((command, module)):
        folder = tmp_path / str(number)
        words = [
            "x",
            "--head_dim",
            "8",
            "--jl_dim",
            "8",
            "--bits",
            "1",
            "--output_dir",
            str(folder),
        ]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as leave:
            entry()
        assert leave.value.code == 0
        assert len(list(folder.iterdir())) == 4
