"""Why some of Lightning's tests are another with our parts in the Trainer: what they ask that no run asks.

A row holds a pattern of modes, of tests and of errors, and the reason; the first row that fits counts.
"""

REASONS: tuple[tuple[str, str, str, str], ...] = ()
