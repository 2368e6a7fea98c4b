"""Control runs and what they are compared with: scenarios, branches, other processes, random generators."""
