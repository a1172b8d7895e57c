"""Random edits of small programs: what is proved must run as the model does."""
