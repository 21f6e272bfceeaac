import ctypes.util
import importlib.metadata
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from veloxquant.planning import doctor
from veloxquant.planning.models import Scan
from veloxquant.planning.room import assumed_room


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_taken_port_is_said_with_a_free_one(taken_port: int) -> None:
    check = doctor.check_port("127.0.0.1", taken_port)
    assert check.status == "warn"
    assert check.hint.startswith("`vq up --port ")
    assert doctor.is_free("127.0.0.1", int(check.hint.strip("`").split()[-1]))


def test_missing_blas_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    (check,) = doctor.check_blas()
    assert (check.status, "libopenblas0-pthread" in check.hint) == ("warn", True)


@pytest.mark.parametrize(
    ("version", "status"), [("0.32.4", "ok"), ("0.31.9", "warn"), ("0.33.0", "warn"), ("", "fail")]
)
def test_library_versions(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    def find(name: str) -> str:
        if not version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    assert [check.status for check in doctor.check_libraries()] == [status, status]


def test_no_model_points_to_the_demo_model() -> None:
    (check,) = doctor.check_models(Scan())
    assert (check.status, "vq models demo" in check.hint) == ("warn", True)


def test_little_room_is_a_warning() -> None:
    assert doctor.check_memory(assumed_room(1000)).status == "warn"
    assert doctor.check_memory(assumed_room(8 << 30)).status == "ok"


def test_everything_together_names_each_check(tmp_path: Path) -> None:
    names = [c.name for c in doctor.check_all(assumed_room(8 << 30), Scan(), "127.0.0.1", 0)]
    assert names[:4] == ["machine", "python", "mlx", "mlx-lm"]
    assert names[-3:] == ["memory", "models", "port"]
