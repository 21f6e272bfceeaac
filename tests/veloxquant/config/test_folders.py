from pathlib import Path

import platformdirs
import pytest

from veloxquant.config.folders import folders
from veloxquant.supervisor import paths


def test_home_variable_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path))
    found = folders()
    assert found.config_file == tmp_path / "config" / "config.toml"
    assert found.models == tmp_path / "data" / "models"
    assert found.state == tmp_path / "state" == paths.find().state
    assert list(tmp_path.iterdir()) == []  # asking creates nothing


def test_otherwise_the_platforms_own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VELOXQUANT_HOME", raising=False)
    assert folders().config == platformdirs.user_config_path("veloxquant", appauthor=False)
    assert folders().state == paths.find().state
