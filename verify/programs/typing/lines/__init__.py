"""Judge the lines of a stage, one after another, over the layouts of what they read."""
