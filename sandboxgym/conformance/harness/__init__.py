"""Control runs and their comparisons: scenarios, branches, other processes, random generators."""
