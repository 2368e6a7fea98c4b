"""Product catalogues: embedded, official, on disk."""
