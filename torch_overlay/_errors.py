"""What the overlay raises."""


class OverlayError(RuntimeError):
    """The overlay cannot do what was asked; torch is as it was before the call."""


class MismatchError(OverlayError):
    """Functions of this torch are not the ones that the overlay was written against."""
