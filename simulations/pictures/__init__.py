"""The scripts behind the pictures of docs/."""
