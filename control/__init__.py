"""Decides and keeps the log."""

if __name__ != "midstream.control":
    raise ImportError("import this package as 'midstream.control', never as 'control'")
