"""The exact packages that were tested together, with their hashes, and which machine installs which of them."""
