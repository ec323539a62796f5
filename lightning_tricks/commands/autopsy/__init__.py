"""`autopsy`: which documents of one optimizer step's batch pulled the weights where.

- `documents`: the batch of a step, and the documents in its rows.
- `gradients`: the gradient of the batch and of each document, and that of the batch without the document.
- `adam_update`: the norm of AdamW's update with and without a document.
- `suspicion`: the score by which documents are ranked.
- `report`: the table, and the file with all figures.
- `autopsy`: reads the checkpoint and calls the others.
"""
