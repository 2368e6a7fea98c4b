"""Level 3: checks of random futures and random streams."""
