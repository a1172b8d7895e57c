"""The intermediate representation: graphs, and how their operations are placed."""
