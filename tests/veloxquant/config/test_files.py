import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from veloxquant.config.files import write_atomically

KILLED = """
import os, signal, sys
from pathlib import Path
from veloxquant.config.files import write_atomically
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), "half")
"""


def test_the_next_write_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "config.toml"
    target.write_text("old")
    done = subprocess.run([sys.executable, "-P", "-c", KILLED, str(target)], timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert target.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    write_atomically(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
    assert target.read_text() == "new"


def test_the_file_is_the_users_alone_and_a_link_stays_one(tmp_path: Path) -> None:
    link, target = tmp_path / "config.toml", tmp_path / "elsewhere" / "mine.toml"
    target.parent.mkdir()
    link.symlink_to(target)
    old = os.umask(0)
    try:
        write_atomically(link, "[server]\n")
    finally:
        os.umask(old)
    assert link.is_symlink()
    assert target.read_text() == "[server]\n"
    assert target.stat().st_mode & 0o777 == 0o600


def test_a_failure_leaves_the_old_content_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "x", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "x", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"
