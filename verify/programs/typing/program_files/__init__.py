"""Read the text of role programs into data; nothing of it runs."""
