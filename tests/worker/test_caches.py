from pathlib import Path
from typing import Any

import pytest

from veloxquant.supervisor.messages import LaunchSpec
from veloxquant.worker.caches import config_of
from veloxquant.worker.faults import WorkerFault


@pytest.mark.parametrize(
    ("method", "options", "code", "named"),
    [
        ("nothing", {}, "usage", "nothing"),
        ("kivi", {"nothing": 1}, "usage", "nothing"),
        ("kivi", {"bit_width_inlier": 99}, "usage", "bit_width_inlier"),
        ("h2o", {"kivi_bits": 2}, "usage", "kivi_bits"),
        ("fp16", {"method": "kivi"}, "usage", "method"),
        ("kivi", {"eviction_storage": "affine4"}, "usage", "eviction_storage"),
    ],
)
def test_settings_that_cannot_work_are_named(
    method: str, options: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(WorkerFault) as fault:
        config_of(LaunchSpec("m", method, options))
    assert fault.value.code == code
    assert named in fault.value.detail


def test_options_reach_the_configuration() -> None:
    config = config_of(LaunchSpec("m", "a2ats", {"a2ats_window": 64, "seed": 3}))
    assert (config.a2ats_window, config.seed) == (64, 3)
    config = config_of(LaunchSpec("m", "snapkv", {"eviction_storage": "affine4"}))
    assert config.eviction_storage == "affine4"


def test_the_specification_needs_no_mlx() -> None:
    import subprocess
    import sys

    script = (
        "import sys, veloxquant.worker.server, veloxquant.worker.caches, veloxquant.worker.gate\n"
        "bad = {'mlx', 'mlx_lm', 'transformers', 'torch', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=Path(__file__).parent)
    assert done.returncode == 0
