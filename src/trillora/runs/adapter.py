"""The adapter of a run that may not be finished: then it is made of the newest valid checkpoint.

    adapter_of(run).folder          runs/first/exports/adapter-step-12
    adapter_of(run).note           "The run is not finished: its adapter at the last checkpoint is used, step 12 of 40."

It is written to a folder of its own: the checkpoint may be at an address, the run may remove it at any time, and it has
no tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from trillora.data.open import chat_template
from trillora.data.rendering.chat_templates import find_template
from trillora.errors import TrilloraError
from trillora.events import Listener, Note, ignore_events
from trillora.files.checksums import with_checksums
from trillora.files.storage import LocalStorage
from trillora.model.adapters import TEMPLATE_FILE
from trillora.model.loading.growth import tokenizer_files
from trillora.recipe.schema import stages_of
from trillora.runs.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, EXPORTS
from trillora.runs.saved import SavedAdapter, SavedRun, not_finished


def adapter_of(
    run: SavedRun,
    which: str | Path | None = None,
    *,
    base: str | None = None,
    listener: Listener = ignore_events,
) -> SavedAdapter:
    """`which` is the name of one of several adapters, or the folder of another one. `base` is the base model that the
    user named."""
    if which is not None or run.is_finished or run.parts:
        return run.finished_adapter(which)
    found = run.checkpoints().newest_valid(listener)
    if found is None:
        raise not_finished(run, "it has no adapter yet, and no checkpoint")
    step, files = found
    if ADAPTER_WEIGHTS not in files:
        raise not_finished(run, "it trains several adapters together, and has no adapter yet")
    opened = run.open_base(base)
    data = stages_of(run.recipe)[-1].recipe.data
    adapter = {file: files[file] for file in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)}
    adapter |= {**tokenizer_files(opened.tokenizer, opened.folder), **opened.rope_file()}
    if data.chat_template is not None and (template := chat_template(data, opened.tokenizer)) is not None:
        adapter[TEMPLATE_FILE] = template.encode()
    name = f"adapter-step-{step}"
    try:
        LocalStorage(run.folder / EXPORTS).write(name, with_checksums(step, adapter))
    except OSError as error:
        raise TrilloraError(
            f"The checkpoint's adapter cannot be written: {error.strerror}.",
            where=str(run.folder / EXPORTS / name),
            do="free disk space, or copy the run to a folder that you can write to",
        ) from error
    num_steps = run.manifest.num_steps if run.manifest is not None else None
    of = "" if num_steps is None else f" of {num_steps}"
    note = f"The run is not finished: its adapter at the last checkpoint is used, step {step}{of}."
    listener(Note(note))
    return SavedAdapter(run.folder / EXPORTS / name, run, note)


def template_of(folder: Path) -> str | None:
    """The chat template next to an adapter, if it was trained with its own."""
    file = folder / TEMPLATE_FILE
    return find_template(str(file), (), None) if file.is_file() else None
