"""Wrong operators, each under an annotation that is right for its twin."""
