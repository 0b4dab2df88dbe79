"""What an edit is, and what edits of every site share."""
