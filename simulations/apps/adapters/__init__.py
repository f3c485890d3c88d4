"""A frozen backbone that was trained on public pictures, and a small adapter that users share."""
