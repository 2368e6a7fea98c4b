"""Programs and commands that show the state a shell sandbox keeps, loses, leaks and limits."""
