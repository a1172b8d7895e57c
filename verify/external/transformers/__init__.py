"""Models of transformers, parallelised by their own plans."""
