"""Rows to batches: from the user's files to arrays in which exactly the right tokens are trained.

In the order of the data: `reading` finds files and reads rows; `rendering` turns a row into text with trained spans, in
child processes with limits; `tokenizing` turns text into tokens and stores them on disk; `documents` selects, repeats
and splits them; `pack` and `batches` serve them by step. `prepare` runs all of it, `open` calls it for a recipe.

The package needs only NumPy and a tokenizer. This file imports nothing, so that worker processes start fast.
"""
