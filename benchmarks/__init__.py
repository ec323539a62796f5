"""What is measured against whom; README.md says how to run it and what the figures mean."""
