"""Say what a verification found: verdicts, findings, checks, reports, and the tolerances they rest on."""
