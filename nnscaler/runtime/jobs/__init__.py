"""Local jobs: the ranks of a program as processes of this machine."""
