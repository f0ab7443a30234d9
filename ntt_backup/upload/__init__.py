"""The way of blobs to the remote: a worker, its queue, and the strategies that send batches."""
