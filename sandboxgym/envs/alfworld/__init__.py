"""Text games of household tasks, in the file format of ALFWorld."""
