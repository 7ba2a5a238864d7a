"""Runs the command line: `python -m trillora`."""

from __future__ import annotations

from trillora.cli import main

if __name__ == "__main__":
    main()
