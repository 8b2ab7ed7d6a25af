"""Train a DFlash drafter for a target: regenerate responses, fit, score, export."""
