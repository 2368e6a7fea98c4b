"""The program that attacks from inside a sandbox: standard library only, syntax of Python 3.6, no import from outside.

1. It reads one line of JSON per attempt, and answers with one line: refused, worked or absent, and why. It judges
   nothing: whether something that worked was an attack is observed from outside.
2. Every attempt is a process of its own with a time limit, which a filter may kill; its locks, descriptors and memory
   are freed with that process when it is told to release them.
3. Its files are copied into the sandbox unchanged and run by the Python there: ``python3 -m inside``.
"""
