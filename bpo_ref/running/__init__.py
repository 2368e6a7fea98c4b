"""What a run shows and keeps: its folder, which no other run may take, and what it tells the terminal or a log file."""
