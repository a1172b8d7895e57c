"""The gate: everything that a project wants verified before it is deployed, as one run with one exit code.

settings   `[tool.nnscaler.gate]` of pyproject.toml
items      what is verified: an operator, a model under one plan, or a program that is not nnScaler's
baseline   findings that are known, with owner and expiry date
state      what the last run gave, and how long each item took
order      worst first
work       what a child process does for an item
run        all items, in child processes, within a budget of time
outcome    which findings are new, and the exit code
summary    Markdown that can be pasted into a review
marked     known findings in machine formats
"""
