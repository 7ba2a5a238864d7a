"""Numbers, sizes, durations and dates as people read them: one format for terminal, page and notebook."""

from __future__ import annotations

import math
from datetime import datetime

NOT_KNOWN = "?"


def format_number(value: float | None) -> str:
    """Three figures that count."""
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


def format_rate(value: float | None) -> str:
    """A learning rate: 2e-4."""
    if value is None:
        return NOT_KNOWN
    if not value:
        return "0"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def format_short(value: float | None) -> str:
    """12.3k, for axes and tiles."""
    if value is None:
        return NOT_KNOWN
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            scaled = value / unit
            return f"{scaled:.0f}{name}" if scaled >= 100 else f"{scaled:.1f}".removesuffix(".0") + name
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")


def format_percent(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    return f"{value:.1%}".replace(".0%", "%").replace("%", "\u00a0%")  # kept on one line


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_time(text: str, how: str = "%d %B %Y, %H:%M %Z") -> str:
    """An ISO time as people write it; as it is where it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return moment.strftime(how).lstrip("0").rstrip()


def format_bytes(count: int | None) -> str:
    if count is None:
        return "?"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 100 or units[0] == "B" else f"{size:.1f} {units[0]}"


def format_count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
