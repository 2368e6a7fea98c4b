"""Programs and commands that show what a shell sandbox keeps, loses, leaks and limits."""
