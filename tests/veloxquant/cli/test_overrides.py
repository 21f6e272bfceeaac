import pytest

from veloxquant.cli import exit_codes
from veloxquant.cli.output import CliError
from veloxquant.cli.overrides import parse_overrides


def test_pairs_become_typed_settings() -> None:
    pairs = ["kivi_group_size=64", "residual_length=128"]
    assert parse_overrides(pairs, "kivi", bits=4) == {
        "bit_width_inlier": 4, "kivi_group_size": 64, "residual_length": 128,
    }  # fmt: skip
    assert parse_overrides([], "fp16") == {}
    packed = {"eviction_storage": "affine4", "snap_budget": 256}
    assert parse_overrides([f"{k}={v}" for k, v in packed.items()], "snapkv") == packed


@pytest.mark.parametrize(
    ("pairs", "method", "bits", "code", "says"),
    [
        (["snap_budget=3"], "kivi", None, exit_codes.USAGE, "kivi_group_size"),
        (["nonsense"], "kivi", None, exit_codes.USAGE, "FIELD=VALUE"),
        (["=3"], "kivi", None, exit_codes.USAGE, "FIELD=VALUE"),
        (["kivi_group_size=x"], "kivi", None, exit_codes.USAGE, "whole number"),
        (["kivi_group_size=48"], "kivi", None, exit_codes.USAGE, "one of 32, 64, 128"),
        (["eviction_storage=affine4"], "kivi", None, exit_codes.USAGE, "kivi_group_size"),
        (["eviction_storage=zip"], "h2o", None, exit_codes.USAGE, "turboquant4"),
        ([], "kivi", 7, exit_codes.USAGE, "bit_width_inlier=7"),
        ([], "fp16", 4, exit_codes.USAGE, "no bit width"),
        ([], "kivy", None, exit_codes.NOT_FOUND, "Did you mean kivi"),
    ],
)
def test_refusals_name_what_is_legal(
    pairs: list[str], method: str, bits: int | None, code: int, says: str
) -> None:
    with pytest.raises(CliError) as caught:
        parse_overrides(pairs, method, bits)
    assert caught.value.exit_code == code
    assert says in caught.value.message + caught.value.hint
