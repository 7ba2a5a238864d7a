"""What a run's folder knows about its checkpoints, which are often stored elsewhere: `saved.json`.

    {"run": "5f0c…", "step": 120, "where": "gs://bucket/run/step-00000120"}

Without it, a drive that is not mounted would look like a run that has not started, and the checkpoints of another run
like this one's. The id is also in every checkpoint, so a new machine that has only the checkpoints adopts it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict

from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Listener, Saved
from trillora.files.read_json import read_json
from trillora.files.storage import Storage
from trillora.runs.files import SAVED_FILE
from trillora.runs.manifest import SavedRecord
from trillora.training.run_folder import RunFolder

_START_OVER = "to start over, use another --out or remove the run's folder"


class RunIdRecord:
    """The record of one run in its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        file = folder.path / SAVED_FILE
        self._found: SavedRecord | None = None
        if os.path.lexists(file):
            do = "restore this file from a copy, or remove it if this run's checkpoints are in place"
            self._found = read_json(file, SavedRecord, do=do)
        self.run_id = self._found.run if self._found else uuid.uuid4().hex

    def check_place(self, storage: Storage) -> None:
        """Refuses a started run whose checkpoints are gone, before anything is created in their place."""
        try:
            is_there = storage.exists()
        except OSError:
            return  # reported by the first use
        if not is_there:
            self._refuse_if_started(storage.where)

    def compare(self, steps: Sequence[int], run_id: str | None, place: str, listener: Listener) -> None:
        """Compare the record with the steps of the existing checkpoints, ascending, and the id in the newest valid one,
        which is None if there is none."""
        found = self._found
        if not steps:
            self._refuse_if_started(place)
        elif found is not None and found.step is not None and steps[-1] < found.step:
            listener(Alarm(f"The newest checkpoint, {found.where}, is missing. Resuming from an older one."))
        if found is not None and run_id is not None and run_id != found.run:
            raise TrilloraError(
                "These checkpoints belong to another run.",
                where=place,
                do=f"use the train.checkpoint_dir of the run in {self._folder.path}, or another --out",
            )
        self.run_id = run_id or self.run_id

    def write(self, step: int | None, where: str = "") -> None:
        self._folder.write(SAVED_FILE, json.dumps(asdict(SavedRecord(self.run_id, step, where))) + "\n")

    def listening(self, listener: Listener) -> Listener:
        """A listener that records every saved checkpoint, then passes the event to `listener`."""

        def listen(event: Event) -> None:
            if isinstance(event, Saved):
                try:
                    self.write(event.step, event.where)
                except TrilloraError as error:  # the checkpoint itself is saved
                    listener(Alarm(f"{error.what} Where: {error.where}. Training continues."))
            listener(event)

        return listen

    def _refuse_if_started(self, place: str) -> None:
        found = self._found
        if found is None or found.step is None:
            return
        moved = f"mount or restore {found.where}" if found.where.startswith(place) else f"copy {found.where} there"
        raise TrilloraError(
            f"The checkpoints of this run are missing: step {found.step} was saved, and now there is none. A run never "
            "restarts by itself.",
            where=place,
            do=f"{moved} and run the same command again; {_START_OVER}",
        )
