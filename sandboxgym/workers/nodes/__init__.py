"""The nodes of a fleet: which of them get new work, what each may hold, and which are being left."""
