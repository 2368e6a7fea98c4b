"""The shop's search engine, which ranks exactly as Lucene does."""
