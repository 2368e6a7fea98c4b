"""What an agent has of a sandbox: the formats of its calls, an editor, and checks of settings."""
