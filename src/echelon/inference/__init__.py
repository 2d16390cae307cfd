"""Using what a run has trained: files for other programs, predictions for new samples, a service."""


class Text(str):
    """A text that names no file: from somebody who may not choose what is read here."""

    __slots__ = ()


class Lines(Text):
    """What a file with one text a line would hold."""

    __slots__ = ()


class Address(str):
    """A URL of files to predict, where a text could look like one."""

    __slots__ = ()
