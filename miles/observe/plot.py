"""A curve drawn with braille dots, two by four to a character, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from miles.observe.text import number

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # [column][row] of one braille character
_BLOCKS = "▁▂▃▄▅▆▇█"


def curve(
    points: Sequence[tuple[float, float]], width: int, height: int, right: float, low: float = 0.0, high: float = 1.0
) -> list[str]:
    """`height` lines of `width` characters: the points joined by lines, x from the first point to `right` or the last.

    The y axis spans [low, high], widened where the points need more; its ends are printed at the left.
    """
    low, high = min([low, *(y for _, y in points)]), max([high, *(y for _, y in points)])
    labels = [number(high), *[""] * (height - 2), number(low)]
    margin = max(len(label) for label in labels)
    columns = max(width - margin - 2, 1)
    grid = [[0] * columns for _ in range(height)]
    left = min((x for x, _ in points), default=0.0)
    right = max([right, *(x for x, _ in points)])
    across, down = columns * 2 - 1, height * 4 - 1
    places = [
        (
            round((x - left) / (right - left) * across) if right > left else 0,
            round((1 - (y - low) / (high - low)) * down) if high > low else down,
        )
        for x, y in points
    ]
    for start, end in zip(places[:1] + places, places, strict=False):
        _line(grid, start, end)
    rows = ["".join(chr(0x2800 + cell) for cell in line) for line in grid]
    return [f"{label:>{margin}} {'┤' if label else '│'}{row}" for label, row in zip(labels, rows, strict=True)]


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as block characters, scaled to their own range."""
    shown = list(values)[-width:] if width > 0 else []
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    if span == 0:
        return _BLOCKS[3] * len(shown)
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)


def _line(grid: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for i in range(steps + 1):
        x = round(start[0] + (end[0] - start[0]) * i / steps)
        y = round(start[1] + (end[1] - start[1]) * i / steps)
        grid[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
