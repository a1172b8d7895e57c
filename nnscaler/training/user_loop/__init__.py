"""What a loop of the user's does beside the engine: told or refused where nothing of it would be right."""
