"""The demo target and drafter."""
