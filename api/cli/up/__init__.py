"""A whole local cluster under one supervisor."""
