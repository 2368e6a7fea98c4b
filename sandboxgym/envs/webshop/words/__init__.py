"""Words: lists, nouns, the original's two comparisons of texts."""
