"""Text games of household tasks, in ALFWorld's file format."""
