"""Tell or refuse mistakes of a user's own loop beside the engine, of which nothing else would be heard."""
