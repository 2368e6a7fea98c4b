"""Thin bridges to other libraries, one module each: nothing is imported from a library that you do not use."""
