import pytest

from veloxquant.panel import units


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (4_660_000_000, "4.34 GiB"),
        (13 << 30, "13.0 GiB"),
        (999 << 20, "999 MiB"),
        (-(5 << 20), "-5.00 MiB"),
    ],
)
def test_size(count, shown):
    assert units.size(count) == shown


def test_pair_has_one_unit():
    assert units.pair(3 << 30, 4 << 30) == "3.00/4.00 GiB"
    assert units.pair(3 << 20, 4 << 30) == "0.00/4.00 GiB"


@pytest.mark.parametrize(
    ("count", "shown"), [(None, "-"), (512, "512"), (4096, "4k"), (131_072, "131k"), (2e6, "2.0M")]
)
def test_short_tokens(count, shown):
    assert units.short_tokens(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (12, "12 s"), (720, "12 min"), (7200, "2 h"), (9 * 86400, "9 d")],
)
def test_ago(seconds, shown):
    assert units.ago(seconds) == shown


def test_clock_and_speed():
    assert units.clock(7) == "00:07"
    assert units.clock(12 * 60 + 41 + 3600) == "01:12:41"
    assert units.seconds(0.384) == "0.38 s"
    assert units.speed(41.27) == "41.3 tok/s"
    assert units.speed(0) == "-"
    assert units.params(135_000_000) == "135M"
    assert units.params(8_200_000_000) == "8.2B"
    assert units.percent(1, 0) == "-"
