"""What the tests share: tiny model pairs, running servers and the identity check."""
