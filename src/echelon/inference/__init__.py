"""Using what a run has trained: files for other programs, predictions for new samples, a service."""


class Text(str):
    """A text that names no file: from somebody who may not choose what is read here."""

    __slots__ = ()


class Lines(Text):
    """What a file with one text a line would hold."""

    __slots__ = ()
