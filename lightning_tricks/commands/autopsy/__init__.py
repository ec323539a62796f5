"""`autopsy`: rank the documents of one optimizer step's batch by how far each stands out.

From the first to the last: `documents`, `gradients`, `report`, `autopsy`.
"""
