"""Why a tensor is not the reference's: one table of causes, for every command."""
