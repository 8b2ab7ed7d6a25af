"""What goes wrong in training and can be mended by whoever started it."""


class TrainError(ValueError):
    """A stage that cannot run; the message names key, file or line, reason and remedy."""
