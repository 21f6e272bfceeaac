"""Bytes, tokens, seconds and speeds as people read them."""

_STEPS = (
    (1 << 40, "TiB", "T"),
    (1 << 30, "GiB", "G"),
    (1 << 20, "MiB", "M"),
    (1 << 10, "KiB", "K"),
)


def _digits(value: float) -> str:
    """Three significant digits, never an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(count: float | None) -> str:
    """Bytes with a unit: `4.34 GiB`; a dash for unknown."""
    return _size(count, 1)


def short_size(count: float | None) -> str:
    """Bytes with a letter: `4.34 G`; a dash for unknown."""
    return _size(count, 2)


def _size(count: float | None, column: int) -> str:
    if count is None:
        return "-"
    sign = "-" if count < 0 else ""
    count = abs(count)
    for step in _STEPS:
        if count >= step[0]:
            return f"{sign}{_digits(count / step[0])} {step[column]}"
    return f"{sign}{count:.0f} B"


def pair(part: float, whole: float) -> str:
    """Two byte counts with one unit: `2.90/4.34 GiB`."""
    for step, unit, _ in _STEPS:
        if whole >= step:
            return f"{_digits(part / step)}/{_digits(whole / step)} {unit}"
    return f"{part:.0f}/{whole:.0f} B"


def tokens(count: int | None) -> str:
    """Tokens with thousands marks: `131,072`."""
    return "-" if count is None else f"{count:,}"


def short_tokens(count: int | None) -> str:
    """Tokens in four characters: `131k`, `1.0M`, `512`."""
    if count is None:
        return "-"
    if count < 1_000:
        return str(count)
    if count < 1_000_000:
        # contexts are powers of two: 131,072 is called 131k, 4,096 is called 4k
        return f"{count // 1000}k"
    return f"{count / 1e6:.1f}M"


def params(count: int | None) -> str:
    """Parameters of a model: `8.2B`, `135M`."""
    if not count:
        return "-"
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def clock(seconds: float) -> str:
    """A running time: `00:12:41`, or `00:07` below an hour when asked for minutes."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours:02}:{minutes:02}:{secs:02}" if hours else f"{minutes:02}:{secs:02}"


def seconds(value: float | None) -> str:
    """A short time: `0.38 s`, `12.4 s`, `3 min`, `2 h`."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    return ago(value)


def ago(value: float | None) -> str:
    """An age in one unit: `40 s`, `12 min`, `2 h`, `9 d`; a dash for never."""
    if value is None:
        return "-"
    if value < 90:
        return f"{max(0, value):.0f} s"
    if value < 5400:
        return f"{value / 60:.0f} min"
    if value < 129_600:
        return f"{value / 3600:.0f} h"
    return f"{value / 86_400:.0f} d"


def speed(value: float | None) -> str:
    """Tokens a second: `41.3 tok/s`; a dash when nothing runs."""
    return "-" if not value else f"{_digits(value)} tok/s"


def percent(part: float, whole: float) -> str:
    """A share: `12 %`; a dash without a whole."""
    return "-" if not whole else f"{100 * part / whole:.0f} %"
