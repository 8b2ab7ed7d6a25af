"""Running servers and measuring them."""
