"""Draws a screen of the app as a PNG on an exact cell grid; block and line characters as shapes."""

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.color import ColorType
from rich.segment import Segment

CELL_W, CELL_H, PAD = 12, 25, 14
FONTS = Path("/usr/share/fonts/truetype/dejavu")
EIGHTHS = " ▁▂▃▄▅▆▇█"
SHADES = {"░": 4, "▒": 2, "▓": 0}
LINES = {"─": "lr", "│": "ud", "╭": "dr", "╮": "dl", "╰": "ur", "╯": "ul"}


def _rgb(color, default):
    if color is None or color.type == ColorType.DEFAULT:
        return default
    return tuple(color.get_truecolor())


def draw(strips, path: Path, ink=(232, 234, 242), paper=(16, 19, 27)) -> None:
    """Write the strips of a compositor to `path`."""
    strips = [list(strip) for strip in strips]
    wide = max(sum(segment.cell_length for segment in strip) for strip in strips)
    image = Image.new("RGB", (wide * CELL_W + 2 * PAD, len(strips) * CELL_H + 2 * PAD), paper)
    pen = ImageDraw.Draw(image)
    fonts = {
        bold: ImageFont.truetype(str(FONTS / f"DejaVuSansMono{'-Bold' if bold else ''}.ttf"), 20)
        for bold in (False, True)
    }
    for row, strip in enumerate(strips):
        x = PAD
        for segment in strip:
            x = _segment(pen, fonts, segment, x, PAD + row * CELL_H, ink, paper)
    image.save(path, optimize=True)


def _segment(pen, fonts, segment: Segment, x: int, y: int, ink, paper) -> int:
    style = segment.style
    fg = _rgb(style.color if style else None, ink)
    bg = _rgb(style.bgcolor if style else None, paper)
    if style and style.reverse:
        fg, bg = bg, fg
    if style and style.dim:
        fg = tuple((a + b) // 2 for a, b in zip(fg, bg, strict=True))
    for char in segment.text:
        cells = Segment(char).cell_length
        if not cells:
            continue
        box = (x, y, x + cells * CELL_W - 1, y + CELL_H - 1)
        pen.rectangle(box, fill=bg)
        _char(pen, fonts[bool(style and style.bold)], char, box, fg)
        x += cells * CELL_W
    return x


def _char(pen, font, char: str, box, fg) -> None:
    x0, y0, x1, y1 = box
    if char in EIGHTHS[1:]:
        high = round(CELL_H * EIGHTHS.index(char) / 8)
        pen.rectangle((x0, y1 - high + 1, x1, y1), fill=fg)
    elif char in "▌▐":
        half = CELL_W // 2
        pen.rectangle(
            (x0, y0, x0 + half - 1, y1) if char == "▌" else (x0 + half, y0, x1, y1), fill=fg
        )
    elif char in SHADES:
        for px in range(x0, x1 + 1):
            for py in range(y0, y1 + 1):
                keep = (px + py) % 2 == 0 if SHADES[char] == 2 else (px % 2 == 0 and py % 2 == 0)
                if keep != (SHADES[char] == 0):
                    pen.point((px, py), fill=fg)
    elif char in LINES:
        _line(pen, LINES[char], x0 + CELL_W // 2, y0 + CELL_H // 2, box, fg)
    elif char != " ":
        pen.text((x0, y0 + 1), char, font=font, fill=fg)


def _line(pen, ways: str, mx: int, my: int, box, fg) -> None:
    ends = {"l": (box[0], my), "r": (box[2], my), "u": (mx, box[1]), "d": (mx, box[3])}
    for way in ways:
        pen.line([(mx, my), ends[way]], fill=fg)
