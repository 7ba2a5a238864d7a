"""Proves in a minute that the chips of this machine train correctly, and measures how fast they are."""
