"""The OpenAI protocol over HTTP: requests join and leave one batch between decode steps."""
