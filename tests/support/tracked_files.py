"""What a tracker has written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="reads with tensorboard itself")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
