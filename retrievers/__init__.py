"""What brings chunks to a question."""
