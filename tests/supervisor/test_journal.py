import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant.supervisor.failures import fault
from veloxquant.supervisor.journal import Journal, kill_left_over, spec_hash, write_atomic
from veloxquant.supervisor.messages import LaunchSpec

SPEC = LaunchSpec("/models/a")
OTHER = LaunchSpec("/models/b")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.json"


def run(path, spec=SPEC, outcome="crashed", reason=None) -> Journal:
    journal = Journal(path)
    record = journal.began(spec, os.getpid(), 0, ["x"])
    journal.ended(record, outcome, reason, ["last words"])
    journal.save()
    return journal


def test_what_was_written_is_read(path):
    run(path, reason=fault("segfault"))
    (record,) = Journal(path).records
    assert record.spec == SPEC
    assert (record.outcome, record.last_lines) == ("crashed", ["last words"])
    assert record.reason == fault("segfault")
    assert path.stat().st_mode & 0o777 == 0o600


def test_give_up_survives_and_a_command_ends_it(path):
    journal = run(path)
    journal.gave_up(fault("crash_loop", "again"))
    journal.save()
    again = Journal(path)
    assert again.adopt() == (fault("crash_loop", "again"), [])
    assert again.barred(SPEC)
    assert not again.barred(OTHER)
    again.acknowledge()
    again.save()
    assert Journal(path).adopt()[0] is None
    assert not Journal(path).barred(SPEC)


def test_two_unclean_ends_bar_and_a_clean_one_does_not(path):
    run(path)
    assert not Journal(path).barred(SPEC)
    journal = Journal(path)
    journal.acknowledge()
    journal.save()
    run(path)
    assert Journal(path).barred(SPEC)
    run(path, outcome="stopped")
    assert not Journal(path).barred(SPEC)


def test_reboot_while_running_bars_and_is_told(path):
    journal = Journal(path)
    record = journal.began(SPEC, os.getpid(), 0, ["x"])
    record.boot = "another boot"
    journal.save()
    again = Journal(path)
    why, found = again.adopt()
    assert why is not None
    assert why.code == "orphaned"
    assert found == ["the machine restarted while the server ran"]
    assert again.barred(SPEC)


def test_open_record_of_a_process_that_is_not_it_is_closed_and_the_process_lives(path):
    journal = Journal(path)
    record = journal.began(SPEC, os.getpid(), 0, ["not our command line"])
    assert not kill_left_over(record)
    journal.save()
    why, found = Journal(path).adopt()
    assert why is None
    assert found == ["the supervisor ended while the server ran"]


@pytest.mark.parametrize("cut", [0, 1, 10, 200])
def test_cut_file_is_set_aside_and_named(path, cut):
    run(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    journal = Journal(path)
    assert journal.records == []
    assert "kept as journal.json.corrupt-1" in journal.notices[0]
    path.write_bytes(whole[:cut])
    assert "corrupt-2" in Journal(path).notices[0]


@settings(max_examples=60)
@given(noise=st.binary(max_size=200))
def test_any_bytes_in_the_file_still_start(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("j") / "journal.json"
    path.write_bytes(noise)
    assert Journal(path).records == []


def test_only_the_newest_records_are_kept(path):
    journal = Journal(path)
    for n in range(60):
        journal.ended(journal.began(LaunchSpec(f"/m/{n}"), 1, 0, []), "stopped", None, [])
    assert len(journal.records) == 50
    assert journal.records[-1].spec.model == "/m/59"


def test_failed_write_keeps_the_old_content(path):
    write_atomic(path, b"old")
    with pytest.raises(FileExistsError):
        write_atomic(path / "not a folder", b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_supervisor_left_half_written_goes_with_the_next_write(path):
    code = (
        "import os, signal, sys; from pathlib import Path; from veloxquant.supervisor.journal "
        "import write_atomic; os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
        "write_atomic(Path(sys.argv[1]), b'half')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, str(path)], timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert len(list(path.parent.iterdir())) == 1
    write_atomic(path, b"new")
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [(path.name, b"new")]


def test_hash_names_a_specification():
    assert spec_hash(SPEC) == spec_hash(LaunchSpec("/models/a"))
    assert spec_hash(SPEC) != spec_hash(OTHER)
