"""From what a recipe names to raw rows: files, archives and streams read in place, in bounded memory."""
