"""Complete Flower apps, and the script that compares strategies on one of them."""
