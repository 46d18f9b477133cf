"""Moving one request: the protocol, the plan and the transfers."""

if __name__ != "midstream.migration":
    raise ImportError("import this package as 'midstream.migration', never as 'migration'")
