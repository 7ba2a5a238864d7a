"""From a raw row to the text that is trained: formats, templates and answers, in child processes with limits."""
