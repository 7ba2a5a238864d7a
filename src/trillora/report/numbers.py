"""Formats numbers, sizes, durations and dates for people. Terminal, HTML and notebook output all use these functions.

>>> format_number(12345.6), format_short(12345.6), format_rate(2e-4)
('12,346', '12.3k', '2e-4')
>>> format_duration(5 * 3600 + 120), format_bytes(538_060_288)
('5 h 02 min', '538 MB')
"""

from __future__ import annotations

import math
from datetime import datetime

NOT_KNOWN = "?"
MAX_DURATION = 1000 * 86400  # seconds; a longer forecast means nothing


def format_number(value: float | None) -> str:
    """Three significant digits, but never fewer than all digits of an integer part below a million."""
    if value is None:
        return NOT_KNOWN
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}" if size else "0"


def format_loss(value: float) -> str:
    """With the digits that adapters differ in."""
    return f"{value:.4f}" if abs(value) < 100 else format_number(value)


def format_rate(value: float | None) -> str:
    """A learning rate."""
    if value is None:
        return NOT_KNOWN
    if not value:
        return "0"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def format_short(value: float | None) -> str:
    """For chart axes and tiles, where space is short."""
    if value is None:
        return NOT_KNOWN
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            scaled = value / unit
            return f"{scaled:.0f}{name}" if scaled >= 100 else f"{scaled:.1f}".removesuffix(".0") + name
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")


def format_percent(value: float | None) -> str:
    """A fraction as a percentage, with a no-break space before the sign."""
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    return f"{value:.1%}".replace(".0%", "%").replace("%", "\u00a0%")


def format_duration(seconds: float) -> str:
    if not 0 <= seconds < MAX_DURATION:  # also false for NaN
        return NOT_KNOWN
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_time(text: str, how: str = "%d %B %Y, %H:%M %Z") -> str:
    """Formats an ISO 8601 time. Returns any other text unchanged."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment.strftime(how).lstrip("0").rstrip()


def format_bytes(count: int | None) -> str:
    """Decimal units: 1 kB is 1000 bytes."""
    if count is None:
        return NOT_KNOWN
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 100 or units[0] == "B" else f"{size:.1f} {units[0]}"


def format_count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
