"""`python -m trillora` is the command line."""

from __future__ import annotations

from trillora.cli import main

if __name__ == "__main__":
    main()
