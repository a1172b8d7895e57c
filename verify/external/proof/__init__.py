"""Proof of external programs: one rank's traced graph against the plain model's, by the algebra of layouts."""
