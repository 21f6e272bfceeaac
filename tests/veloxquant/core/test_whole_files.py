import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from veloxquant.core.whole_files import _machine, write_file

HERE = _machine()


@pytest.fixture(scope="module")
def dead() -> int:
    """Number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_what_killed_writers_left_is_removed_and_nothing_else(dead: int, tmp_path: Path) -> None:
    mine, parent = os.getpid(), os.getppid()
    # The last one is of another process that had this one's number.
    left = [f".x.npy.{HERE}.{n}.tmp" for n in (f"{dead}.3", "4294967295.0", f"{mine}.99999")]
    kept = (
        f".x.npy.{HERE}.{parent}.0.tmp", f".x.npy.{HERE}.1.0.tmp",
        f".y.npy.{HERE}.{dead}.3.tmp", f"x.npy.{HERE}.{dead}.3.tmp", f".xxnpy.{HERE}.{dead}.3.tmp",
        f".x.npy.{HERE}.{dead}.tmp.npy", f".x.npy.other-{HERE}.{dead}.3.tmp",
        f".x.npy.{dead}.3.tmp",
    )  # fmt: skip
    for name in (*left, *kept):
        (tmp_path / name).write_bytes(b"half")
    write_file(tmp_path / "x.npy", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "x.npy"}


def test_files_of_other_machines_go_by_age(dead: int, tmp_path: Path) -> None:
    """And those of names without a machine, as they were once."""
    left = (f".x.npy.other.{os.getpid()}.3.tmp", f".x.npy.{dead}.3.tmp")
    kept = f".x.npy.{HERE}.{os.getppid()}.3.tmp"
    for name in (*left, kept):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (1.0, 1.0))
    write_file(tmp_path / "x.npy", b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {kept, "x.npy"}


def test_a_write_under_way_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread writes while another one is in the middle of the same file."""
    target, real, contents = tmp_path / "x.npy", os.fsync, [b"other"]

    def interrupted(handle: int) -> None:
        real(handle)
        if contents:
            write_file(target, contents.pop())
            assert target.read_bytes() == b"other"

    monkeypatch.setattr(os, "fsync", interrupted)
    write_file(target, b"first")
    assert target.read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_the_next_write_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from veloxquant.core.whole_files import "
        "write_file; os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
        "write_file(Path(sys.argv[1]), b'half')"
    )
    target = tmp_path / "x.npy"
    words = [sys.executable, "-P", "-c", code, str(target)]
    done = subprocess.run(words, check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    write_file(target, b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]
    assert target.read_bytes() == b"whole"
