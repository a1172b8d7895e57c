"""Run tasks in child processes, so that one that dies or hangs ends alone."""
