from pathlib import Path

import pytest

from veloxquant.planning import room as rooms
from veloxquant.planning.room import GIB, Room, assumed_room, measure_room, metal_cap, parse_vm_stat

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                          290000.
Pages wired down:                        100000.
Pages purgeable:                           5000.
"Translation faults":                 123456789.
File-backed pages:                       200000.
Anonymous pages:                         350000.
Pages stored in compressor:              400000.
Pages occupied by compressor:             50000.
"""


def test_room_is_what_neither_others_nor_the_reserve_take() -> None:
    room = Room(32 * GIB, 12 * GIB, 8 * GIB, 21 * GIB, "GPU cap")
    assert (room.nbytes, room.limited_by) == (12 * GIB, "memory in use")
    assert room.describe() == (
        "room 12.0 GiB = 32.0 GiB - 12.0 GiB in use - 8.0 GiB kept free (GPU cap 21.0 GiB)"
    )


def test_room_is_at_most_the_cap() -> None:
    room = Room(32 * GIB, 2 * GIB, GIB, 21 * GIB, "GPU cap")
    assert (room.nbytes, room.limited_by) == (21 * GIB, "cap")


def test_room_is_never_negative() -> None:
    assert Room(8 * GIB, 8 * GIB, GIB, 5 * GIB, "").nbytes == 0


def test_activity_monitor_counts_app_wired_and_compressed() -> None:
    assert parse_vm_stat(VM_STAT) == (350000 - 5000 + 100000 + 50000) * 16384
    assert parse_vm_stat("Pages free: 3.") is None
    assert parse_vm_stat("") is None


@pytest.mark.parametrize(
    ("total", "wired", "cap"),
    [
        (16, 0, 16 * GIB * 2 // 3),
        (36, 0, 24 * GIB),
        (64, 0, 48 * GIB),
        (16, 14336, 14 * GIB),
        (16, 99999, 16 * GIB),
    ],
)
def test_metal_cap(total: int, wired: int, cap: int) -> None:
    assert metal_cap(total * GIB, wired) == cap


def test_a_container_limit_is_the_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 2}\n")
    assert rooms._within_container(8 * GIB, 3, tmp_path) == (2 * GIB, GIB // 2)
    (tmp_path / "memory.max").write_text("max\n")
    assert rooms._within_container(8 * GIB, 3, tmp_path) == (8 * GIB, 3)


def test_measured_room_adds_up_and_gives_back_our_own_server() -> None:
    room = measure_room(keep_free=GIB)
    assert room.keep_free == GIB
    assert 0 <= room.nbytes <= room.cap <= room.total
    assert measure_room(own=1 << 60).used == 0


def test_assumed_room_is_exactly_that() -> None:
    assert assumed_room(123).nbytes == 123


@pytest.mark.parametrize(("total", "kept"), [(4, 1), (16, 2), (64, 8), (512, 8)])
def test_reserve_is_an_eighth_within_bounds(total: int, kept: int) -> None:
    assert rooms.default_keep_free(total * GIB) == kept * GIB
