"""Tags for short texts: frozen word vectors, word weights that users share, a personal head."""
