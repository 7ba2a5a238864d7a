"""Renders the terminal image of the README: the real output of `trillora inspect`, less two sections, as an SVG.

    python tools/readme_image.py      # writes docs/images/inspect.svg

Run it again after the screen of `trillora inspect` changes. It needs the embedded model's tokenizer, as installed by
`make setup`; it does not use the network.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
IMAGE = ROOT / "docs" / "images" / "inspect.svg"
RECIPE = "recipes/sys-scan-chatml.yaml"
COLUMNS = 104
LEFT_OUT = ("Rows", "Row lengths in tokens")  # to keep the image short


def main() -> int:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text.assemble(("$ ", "dim"), (f"trillora inspect {RECIPE}", "bold")))
    console.print(without_sections(Text.from_ansi(inspect_screen())))
    svg = console.export_svg(title="trillora inspect", unique_id="inspect")
    # No request to a font server: the image uses the monospace font of the system it is viewed on.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace(
        "Fira Code", "ui-monospace, Menlo, Consolas"
    )
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    IMAGE.write_text(svg, "utf-8")
    print(f"{IMAGE.relative_to(ROOT)}: {IMAGE.stat().st_size / 1000:.0f} kB")
    return 0


def inspect_screen() -> str:
    """What `trillora inspect` prints in a terminal, with ANSI colors."""
    # Rich draws colors into a pipe when FORCE_COLOR is set; TERM and COLUMNS fix the palette and the width.
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    command = [sys.executable, "-m", "trillora", "inspect", RECIPE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`trillora inspect` failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.rstrip()


def without_sections(screen: Text) -> Text:
    """Drop the sections in LEFT_OUT. A section is its title and the lines up to the next blank line."""
    kept, dropped, skipping = [], set(), False
    for line in screen.split("\n", allow_blank=True):
        title = line.plain.rstrip()
        if title in LEFT_OUT:
            dropped.add(title)
            skipping = True
        if not skipping:
            kept.append(line)
        skipping = skipping and bool(title)
    if dropped != set(LEFT_OUT):
        raise SystemExit(f"not found on the screen: {sorted(set(LEFT_OUT) - dropped)}; update LEFT_OUT")
    return Text("\n").join(kept)


if __name__ == "__main__":
    sys.exit(main())
