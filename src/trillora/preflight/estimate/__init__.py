"""Memory and time from the traced step alone, without a compiler."""
