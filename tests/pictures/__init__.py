"""What the pictures of the documents show."""
