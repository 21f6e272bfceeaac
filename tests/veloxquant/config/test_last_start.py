from pathlib import Path

import pytest

from veloxquant.config.last_start import load_last, save_last


def test_a_start_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    assert load_last() == {}
    save_last("model", "kivi", 4096)
    assert load_last() == {"model": "model", "method": "kivi", "context": 4096}


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'{"model": 3, "method": "kivi"}', b"\xff"])
def test_what_cannot_be_read_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    save_last("model", "kivi", 4096)
    (tmp_path / "state" / "last_start.json").write_bytes(raw)
    assert "model" not in load_last()


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path / "file"))
    save_last("model", "kivi", 4096)
    assert load_last() == {}


def test_settings_of_the_method_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    save_last("model", "kivi", 4096, {"bit_width_inlier": 4})
    assert load_last()["options"] == {"bit_width_inlier": 4}
    save_last("model", "kivi", 4096, {})
    assert "options" not in load_last()


def test_a_port_is_remembered_when_it_can_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    save_last("model", "kivi", 4096, port=8111)
    assert load_last() == {"model": "model", "method": "kivi", "context": 4096, "port": 8111}
    save_last("model", "kivi", 4096)
    assert "port" not in load_last()
    for wrong in ("0", "65536", "true", '"8111"', "-1"):
        (tmp_path / "state" / "last_start.json").write_text(f'{{"model": "m", "port": {wrong}}}')
        assert load_last() == {"model": "m"}
