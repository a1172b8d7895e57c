"""Export a module with torch.export, and import what it exports."""
