"""A run that stands still says where it stands, and which rank it waits for."""
