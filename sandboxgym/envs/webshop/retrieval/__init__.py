"""The shop's search engine, with Lucene's exact ranking."""
