"""Tools of an agent in a sandbox: the formats of its calls, an editor, and checks of settings."""
