"""What `trillora doctor` shows."""
