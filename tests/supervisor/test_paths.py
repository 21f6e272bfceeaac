import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from veloxquant.supervisor.paths import (
    MAX_SOCKET_BYTES,
    UnsafeFolderError,
    find,
    prepare,
    secure_folder,
)


@pytest.fixture
def short(monkeypatch):
    """A folder whose name leaves room for a socket's path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.delenv("VELOXQUANT_HOME", raising=False)
        yield Path(folder)


def test_everything_lies_below_the_home_variable(monkeypatch, short):
    monkeypatch.setenv("VELOXQUANT_HOME", str(short))
    assert find() == (short / "run", short / "state", short / "log")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has its own runtime folder")
def test_socket_lies_in_the_runtime_folder_of_the_session_or_with_the_state(monkeypatch, short):
    monkeypatch.setenv("XDG_STATE_HOME", str(short / "s"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    assert find().run == short / "veloxquant"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short / "missing"))
    assert find().run == short / "s" / "veloxquant" / "run"
    assert list(short.iterdir()) == []  # nothing is created by looking


def test_long_home_gets_a_short_socket_path(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    monkeypatch.setenv("VELOXQUANT_HOME", str(deep))
    found = find()
    assert len(os.fsencode(found.socket)) <= MAX_SOCKET_BYTES
    assert found.state == deep / "state"
    monkeypatch.setenv("VELOXQUANT_HOME", str(deep) + "2")
    assert find().run != found.run


def test_folders_are_ours_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("VELOXQUANT_HOME", str(tmp_path / "h"))
    for folder in prepare(find()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_readable_folder_of_ours_is_closed_to_others(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir(mode=0o755)
    secure_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_that_others_can_write_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UnsafeFolderError, match="written by others"):
        secure_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


def test_link_and_file_are_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeFolderError, match="is a link"):
        secure_folder(tmp_path / "link")
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsafeFolderError):
        secure_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(UnsafeFolderError, match="belongs to user id 12345"):
        secure_folder(folder)
