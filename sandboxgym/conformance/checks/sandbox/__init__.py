"""Level 4: checks of sandboxes."""
