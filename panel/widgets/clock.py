"""Wall time as the reader's clock shows it."""

from datetime import datetime


def wall_clock(wall: float, *, millis: bool = False) -> str:
    """`12:03:58`, with thousandths on request; blanks when the time is not known."""
    if not wall:
        return " " * (12 if millis else 8)
    at = datetime.fromtimestamp(wall).astimezone()
    text = at.strftime("%H:%M:%S")
    return f"{text}.{at.microsecond // 1000:03}" if millis else text
