"""Workers bring blobs to the remote: each has a queue, and strategies send its batches."""
