"""How numbers, durations and text that a model wrote are shown to a person, in a terminal and on a page."""

from __future__ import annotations

import re
import unicodedata

_MARKERS = re.compile(r"<\|[^<>|]*\|>|</?[a-z_]+>|\[/?INST\]")
_ROLES = frozenset({"system", "user", "assistant", "model", "tool", "human", "ai"})


def printable(text: str) -> str:
    r"""The text with everything that could steer a terminal or reorder a page written out as `\x1b`, `\u202e`...

    Newlines and tabs stay. Model output is hostile: an escape sequence must not reach a terminal.
    """
    return "".join(char if _harmless(char) else _escaped(char) for char in text)


def one_line(text: str, width: int) -> str:
    """The text on one line of at most `width` characters; newlines are shown as a sign."""
    flat = printable(text).replace("\n", "⏎").replace("\t", " ")
    return flat if len(flat) <= width else flat[: max(width - 1, 0)] + "…"


def question(prompt: str) -> str:
    """The last thing a rendered chat prompt asks, without the template's markers and roles; for headings only."""
    pieces = []
    for piece in _MARKERS.split(prompt):
        role, _, rest = piece.strip().partition("\n")
        content = rest.strip() if role.strip().lower() in _ROLES else piece.strip()
        if content:
            pieces.append(content)
    return pieces[-1] if pieces else prompt.strip()


def tail(text: str, width: int) -> str:
    """The text on one line, its end where it is longer than `width`."""
    flat = one_line(text, len(text) * 10)
    return flat if len(flat) <= width else "…" + flat[len(flat) - width + 1 :]


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3m 05s`, `2h 04m`, `3d 02h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def number(value: float) -> str:
    """About four significant digits: `0.0312`, `12.5`, `1,234`, `1.2e-05`, `3.1M`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e15 or size < 1e-3:
        return f"{value:.2g}" if size >= 1e-3 else f"{value:.3g}"
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.3g}{suffix}"
    if size >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"


def gibibytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def _harmless(char: str) -> bool:
    return char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") or char == "\u200d"


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
