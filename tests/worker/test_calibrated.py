from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veloxquant.config.rotations import rotations_file
from veloxquant.planning.method_settings import config_of
from veloxquant.supervisor.messages import Log
from veloxquant.worker.caches import CachePlan
from veloxquant.worker.calibrated import words


def plan(method: str, options: dict[str, Any], **fields: Any) -> CachePlan:
    given = {"kinds": [], "formats": [], "compressed": 30, "warnings": []} | fields
    return CachePlan(config_of(method, options), list, **given)


@pytest.mark.parametrize(
    ("method", "fields", "told"),
    [
        ("kivi", {}, ""),
        ("kvquant", {"compressed": 0}, ""),
        ("kvquant", {"fitted": {"fitted": "2026-11-30"}}, "fitted 2026-11-30, 30 layers"),
        ("kvquant", {"fitted": {}}, "fitted, 30 layers"),
        ("kvquant", {}, "none; `vq precompute M --method kvquant` would fit one"),
    ],
)
def test_words(home: Path, method: str, fields: dict[str, Any], told: str) -> None:
    assert words(plan(method, {}, **fields), "M", {}) == told


def test_the_command_that_would_fit_one_has_the_settings(home: Path) -> None:
    options = {"kvquant_bits": 4}
    assert "--method kvquant --set kvquant_bits=4`" in words(plan("kvquant", options), "M", options)


def test_saved_rotations_are_no_missing_calibration(home: Path) -> None:
    file = rotations_file("model")
    assert words(plan("spectral", {}), "M", {}).startswith("none")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    assert "rotations saved as 'model'" in words(plan("spectral", {}), "M", {})


def test_a_server_says_it_once_it_is_ready(home: Path, make_bench: Callable[..., Any]) -> None:
    bench = make_bench(method="kvquant")
    assert bench.serving.calibration.startswith("none; `vq precompute tiny --method kvquant`")
    assert make_bench(method="kivi").serving.calibration == ""
    assert not [m for m in bench.sent if isinstance(m, Log) and m.level == "error"]
