"""Small parts that every package may use; nothing here imports anything of the collection above it."""
