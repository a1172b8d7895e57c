"""Front ends of others over the engine."""
