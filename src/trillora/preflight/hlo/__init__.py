"""The compiled program: parsed, and timed with the chip's speeds."""
