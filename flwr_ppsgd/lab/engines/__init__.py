"""Engines that train a whole cohort at once."""
