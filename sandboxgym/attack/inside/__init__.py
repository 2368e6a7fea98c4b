"""The program that attacks from inside a sandbox: standard library only, syntax of Python 3.6, no import from outside.

1. It does what it is told, one line of JSON per attempt, and answers with one line: refused, worked or absent, and why.
   It judges nothing: whether something that worked was an attack is seen from outside.
2. Every attempt is a process of its own with a time limit, which a filter may kill; what an attempt holds (locks,
   descriptors, memory) goes with that process when it is told to let go.
3. Its files are copied into the sandbox as they are and run by the Python there: ``python3 -m inside``.
"""
