"""The environments of the suite, one package each."""
