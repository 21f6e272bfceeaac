from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from veloxquant.cache.layouts.rotated import polar_plan, qjl_plan
from veloxquant.cache.table import TABLE
from veloxquant.cli.setting_words import setting_words
from veloxquant.config.small_models import options_for
from veloxquant.planning.method_settings import config_of

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("kivi", {}, "2 bit"),
        ("turboquant_rvq", {"bit_width_inlier": 4}, "4 bit"),
        ("kivi", {"bit_width_inlier": [2, 4, 3]}, "2-4 bit"),
        ("qjl", {}, "k 1 bit, v 2 bit"),
        ("qjl", {"bit_width_inlier": 4, "jl_dim": 256}, "k 256 signs, v 4 bit"),
        ("polar", {}, "2 bit angles, signs"),
        ("snapkv", {}, "exact"),
        ("snapkv", {"eviction_storage": "affine4"}, "affine4"),
        ("gear", {}, "-"),
        ("fp16", {}, "-"),
    ],
)
def test_words_are_of_the_method(method: str, options: dict[str, Any], words: str) -> None:
    assert setting_words(method, options) == words


@pytest.mark.parametrize("bits", [2, 4])
def test_the_layouts_mean_what_the_words_say(bits: int) -> None:
    def bits_a_channel(stream: Any) -> float:
        return 8 * (stream.spec.nbytes(1, 128, 2) - 2) / 128  # without the norm

    config = config_of("qjl", {"bit_width_inlier": bits}, 128)
    assert bits_a_channel(qjl_plan(config).keys) == 1
    assert f"{bits} bit" in qjl_plan(config).values.spec.describe()
    polar = polar_plan(config_of("polar", {"bit_width_inlier": bits}, 128))
    assert bits_a_channel(polar.keys) == bits + 1, "127 angles in whole words, 128 signs"


def test_every_row_of_fit_has_them(run: Run, demo: Path) -> None:
    out = run("fit", "Tiny-1B", "--ram", "8G")[1]
    for name, row in TABLE.items():
        if row.is_ready:
            [line] = [line for line in out.splitlines() if line.split()[:1] == [name]]
            assert setting_words(name, options_for(name, 4096)) in line, "as `vq up` starts it"
