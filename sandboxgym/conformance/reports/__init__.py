"""Reports: terminal, JSON, HTML, Markdown; causes, caveats, one-line verdicts."""
