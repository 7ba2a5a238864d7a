"""Runs the command line: `python -m trillora`."""

from __future__ import annotations

import os
import sys

# `python -m` looks for modules in the working folder first, so a `json.py` there would be run. The few modules that
# are loaded before this line can still come from there. The command `trillora` and `python -P -m trillora` are safe.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from trillora.cli import main

if __name__ == "__main__":
    main()
