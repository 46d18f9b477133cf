"""The whole cluster in one process on virtual time: the production code with in-memory ports and a seeded nemesis."""
