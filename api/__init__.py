"""How people and programs get in: gateway, admin API, CLI."""

if __name__ != "midstream.api":
    raise ImportError("import this package as 'midstream.api', never as 'api'")
