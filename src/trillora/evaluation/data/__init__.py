"""General questions and texts of the forgetting meter."""
