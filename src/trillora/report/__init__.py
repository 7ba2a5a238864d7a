"""Output for people: terminal screens and HTML pages."""
