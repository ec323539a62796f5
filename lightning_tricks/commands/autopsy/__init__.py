"""`autopsy`: rank the documents of one optimizer step's batch by how far each stands out.

- `samples`: the samples that a step took, by what the checkpoints tell.
- `documents`: the documents in the rows of a batch.
- `gradients`: the gradient of the batch and of each document, and that of the batch without the document.
- `adam_update`: the norm of AdamW's update with and without a document.
- `suspicion`: the score by which documents are ranked.
- `report`: the table, and the file with all figures.
- `autopsy`: reads the checkpoint and calls the others.
"""
