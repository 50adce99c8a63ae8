"""Any checkpoint, opened and unread."""
