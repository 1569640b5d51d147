"""Errors that a user can cause; the command line prints them as one sentence and exits with 2."""


class FeddgError(Exception):
    """Something the user can mend. The message says what was found, what was expected and how."""

    exit_code = 2


class SettingsError(FeddgError):
    """A name, flag or value that cannot be used."""


class PluginError(FeddgError):
    """A method or data set that breaks its contract."""


class DataError(FeddgError):
    """A file or folder that is missing, unreadable or not what it claims to be."""


class RunInterruptedError(BaseException):
    """A signal asked the run to stop; its last checkpoint is on disk.

    Attributes:
        signal_number: SIGINT or SIGTERM.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
