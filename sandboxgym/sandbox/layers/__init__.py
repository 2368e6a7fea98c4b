"""File layers of overlay sandboxes: stored, merged, compared, counted and deleted."""
