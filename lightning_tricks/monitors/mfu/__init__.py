"""Throughput and model FLOPs utilization: what a batch holds, what it costs, how long it takes."""
