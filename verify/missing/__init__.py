"""Which operators of a model have no annotation, and which annotation each could have."""
