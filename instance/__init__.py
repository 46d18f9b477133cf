"""One process beside one engine: the llumlet and the engines it can drive."""

if __name__ != "midstream.instance":
    raise ImportError("import this package as 'midstream.instance', never as 'instance'")
