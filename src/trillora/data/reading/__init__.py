"""Reads the data files of a recipe into raw rows: files, archives and streams, in place and in bounded memory."""
