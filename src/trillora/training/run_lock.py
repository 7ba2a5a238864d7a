"""Only one process at a time may use a run's folder, and only one may write its checkpoints.

    with lock_run(run, listener), own_checkpoints(storage, run, listener) as owned:
        ...

See `trillora.files.owner` for how a dead owner is recognized.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trillora.events import Listener, ignore_events
from trillora.files.owner import Ownership, own
from trillora.files.storage import LocalStorage, Storage


@contextmanager
def lock_run(run: Path, listener: Listener = ignore_events) -> Iterator[Ownership]:
    """Lock a run folder and create it if it is missing. TrilloraError if another process uses it."""
    with own(LocalStorage(run), "This run is", "--out", listener) as owned:
        yield owned


@contextmanager
def own_checkpoints(storage: Storage, run: Path, listener: Listener = ignore_events) -> Iterator[Ownership | None]:
    """Own the place of a run's checkpoints. None if it is the run's folder, which has a lock already."""
    if isinstance(storage, LocalStorage) and os.path.realpath(storage.root) == os.path.realpath(run):
        yield None
        return
    with own(storage, "These checkpoints are", "train.checkpoint_dir", listener) as owned:
        yield owned
