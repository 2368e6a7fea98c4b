"""Games: where they come from, and the embedded ones."""
