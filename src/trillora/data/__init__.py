"""Rows to batches: from any file people have to arrays that train exactly the right tokens.

`reading` finds files and reads rows; `rendering` makes text of them that says what is trained, in child processes with
limits; `encode` and `words` make tokens; `store` keeps them on disk; `documents` chooses among them; `pack` and
`batches` serve them by step. `prepare` is the way through all of it. NumPy and a tokenizer only; the package imports
nothing, so that workers start fast.
"""
