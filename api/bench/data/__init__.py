"""The founding figures, for orientation in plots."""
