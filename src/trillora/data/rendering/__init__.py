"""Renders raw rows to the text that is trained: formats, templates and answers, in worker processes with limits."""
