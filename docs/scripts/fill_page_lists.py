"""The index of the pages, for `fill.py`."""

import page_lists
from filler import Filler

FILLERS = {"page_lists": Filler(f"{page_lists.INDEX}.md", lambda _: page_lists.index(), measured=False)}
