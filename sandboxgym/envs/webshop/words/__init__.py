"""Words: lists, nouns, and the original's two comparisons of texts."""
