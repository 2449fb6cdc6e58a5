"""How long work tells what it is doing. The library is silent; the command line draws a bar."""


class Progress:
    """Silent progress: subclass it to show something."""

    def begin(self, what: str, total: int, unit: str = "bytes") -> None:
        """`total` bytes, or another `unit`, of work called `what` begin."""

    def layer(self, number: int, layers: int) -> None:
        """Layer `number` (from 1) of `layers` is being worked on."""

    def advance(self, amount: int) -> None:
        """`amount` bytes, or of the unit, are done more. May be called from any thread."""

    def note(self, text: str) -> None:
        """Something a person may want to know."""
