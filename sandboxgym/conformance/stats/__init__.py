"""Statistical tests of futures with and without a restore."""
