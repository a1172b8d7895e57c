"""`verify-plan --train`: steps of the real optimizer, by the engine that users train with, against the eager model."""
