"""Sources of games: embedded, official, from files."""
