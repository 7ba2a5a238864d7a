"""The kinds of exports by name, as `trillora export --to KIND` and `trillora.load(RUN).export(KIND)` know them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trillora.errors import TrilloraError, nearest
from trillora.events import Listener, ignore_events
from trillora.runs.files import EXPORTS

if TYPE_CHECKING:
    from trillora.export.source import Exported, ExportSource

FOLDERS = ("merged", "gguf", "lora-gguf", "ollama", "text-adapter")  # kinds that are a folder on this machine
DEFAULT_TYPES = {"gguf": "f16", "ollama": "q8_0"}
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # short names for merged models


def check_kind(kind: str, known: tuple[str, ...] = FOLDERS) -> None:
    """Refuses a kind that is not known."""
    if kind not in known:
        meant = nearest(kind, known)
        hint = f"did you mean '{meant}'? " if meant else ""
        raise TrilloraError(f"There is no export to '{kind[:40]}'.", where="--to", do=f"{hint}Use {', '.join(known)}")


def default_folder(source: ExportSource, kind: str, type: str | None = None) -> Path:
    """RUN/exports/KIND, with the type of a GGUF file and the name of one of several adapters."""
    if source.run is None:
        raise TrilloraError(
            "The adapter is not in the folder of a run, so there is no place for the export.",
            where=str(source.adapter),
            do="choose a new folder with --out",
        )
    typed = f"-{type or DEFAULT_TYPES['gguf']}" if kind == "gguf" else ""
    part = "" if source.part is None else f"-{source.part}"
    return source.run / EXPORTS / f"{kind}{typed}{part}"


def export_as(
    kind: str, source: ExportSource, out: Path, *, type: str | None = None, listener: Listener = ignore_events
) -> Exported:
    """Writes an export of one of FOLDERS to the new folder `out`. `type` is the number format in the file."""
    check_kind(kind)
    if kind == "merged":
        from trillora.export.merged import export_merged

        return export_merged(source, out, dtype=DTYPES.get(type, type) if type else None, listener=listener)
    if kind == "gguf":
        from trillora.export.gguf.write import export_gguf

        return export_gguf(source, out, type=type or DEFAULT_TYPES[kind], listener=listener)
    if kind == "ollama":
        from trillora.export.ollama import export_ollama

        return export_ollama(source, out, type=type or DEFAULT_TYPES[kind], listener=listener)
    if kind == "text-adapter":
        from trillora.export.text_adapter import export_text_adapter

        return export_text_adapter(source, out, listener=listener)
    if type not in (None, "f32"):
        raise TrilloraError("A LoRA file has the type f32.", where="--type", do="remove --type")
    from trillora.export.gguf.lora import export_lora_gguf

    return export_lora_gguf(source, out, listener=listener)
