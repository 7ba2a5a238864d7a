"""Types that several modules of the engine share."""

from __future__ import annotations

from typing import Any

Pytree = Any  # a pytree of arrays, or of their shapes: nested dictionaries, tuples and named tuples
