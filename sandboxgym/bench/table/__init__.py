"""All speeds in one table: every operation beside what a user would do instead, comparable with earlier runs."""
