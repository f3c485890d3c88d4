"""A small network for many users, each with rows and habits of their own."""
