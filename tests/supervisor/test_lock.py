import os
import subprocess
import sys

import pytest

from veloxquant.supervisor.lock import InstanceLock, LockTakenError

HOLDER = """
import sys
from pathlib import Path
from veloxquant.supervisor.lock import InstanceLock
InstanceLock(Path(sys.argv[1])).take()
print("held", flush=True)
sys.stdin.read()
"""


def test_second_holder_is_told_who_holds_it(tmp_path):
    lock = InstanceLock(tmp_path / "lock")
    lock.take()
    with pytest.raises(LockTakenError) as taken:
        InstanceLock(tmp_path / "lock").take()
    assert taken.value.pid == os.getpid()
    lock.release()
    again = InstanceLock(tmp_path / "lock")
    again.take()
    again.release()


def test_stale_lock_file_of_a_killed_holder_is_taken(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-P", "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockTakenError) as taken:
            InstanceLock(path).take()
        assert taken.value.pid == holder.pid
        holder.kill()
    lock = InstanceLock(path)
    lock.take()
    lock.release()


def test_child_does_not_inherit_the_lock(tmp_path):
    lock = InstanceLock(tmp_path / "lock")
    lock.take()
    command = ["/bin/sh", "-c", "echo runs; exec sleep 30"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"runs\n"
        lock.release()
        again = InstanceLock(tmp_path / "lock")
        try:
            again.take()
        finally:
            child.kill()
        again.release()


def test_link_in_place_of_the_lock_file_is_refused(tmp_path):
    (tmp_path / "target").write_text("keep")
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        InstanceLock(tmp_path / "lock").take()
    assert (tmp_path / "target").read_text() == "keep"
