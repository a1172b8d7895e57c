"""Find the operators of a model that have no annotation, and suggest one for each."""
