"""Rows to batches: from any file people have to arrays that train exactly the right tokens.

`files` and `readers` (with `streams`, `archives`, `json_rows`) find and read rows; `formats`, `sandbox`, `render` and
`spans` make text of them that says what is trained, in child processes with limits (`worker`, `pool`); `encode` makes
tokens; `store` keeps them on disk; `documents` chooses among them; `pack` and `batches` serve them by step. `prepare`
is the way through all of it. NumPy and a tokenizer only; the package imports nothing, so that workers start fast.
"""
