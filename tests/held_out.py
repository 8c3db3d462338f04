"""Python that the embedded model was not trained on: written for these tests, in the style of the
standard library, for machines whose own standard library is not the manifest's. Each piece stops
where there is something to go on with."""

TEXTS = (
    '''"""Intervals of integers, and what can be done with several of them."""

import bisect
import operator

__all__ = ["Interval", "merge", "covers"]


class Interval:
    """The integers from start up to, and without, stop."""

    def __init__(self, start, stop):
        if stop < start:
            raise ValueError("stop must not be less than start")
        self.start = start
        self.stop = stop

    def __repr__(self):
        return f"{self.__class__.__name__}({self.start!r}, {self.stop!r})"

    def __len__(self):
''',
    '''import os
import sys
import time


def rotate(path, keep=5, *, suffix=".old"):
    """Rename a log file and the older copies of it.

    If there are more than *keep* copies, the oldest one is removed.
    """
    for number in range(keep, 0, -1):
        source = f"{path}{suffix}{number}"
        if not os.path.exists(source):
            continue
        if number == keep:
            os.remove(source)
        else:
            os.rename(source, f"{path}{suffix}{number + 1}")
    if os.path.exists(path):
''',
    '''class WeatherError(Exception):
    """Base class of the errors in this module."""


class StationNotFound(WeatherError):
    """No station has this name."""

    def __init__(self, name):
        super().__init__(f"no station named {name!r}")
        self.name = name


class Station:
    def __init__(self, name, latitude, longitude):
        self.name = name
        self.latitude = latitude
        self.longitude = longitude
        self._readings = []

    def add(self, reading):
        self._readings.append(reading)

    def mean(self):
        if not self._readings:
            raise WeatherError("there are no readings")
''',
    """import unittest
from test import support


class QueueTest(unittest.TestCase):
    def setUp(self):
        self.queue = BoundedQueue(3)

    def test_empty(self):
        self.assertEqual(len(self.queue), 0)
        self.assertRaises(IndexError, self.queue.pop)

    def test_push(self):
        self.queue.push("a")
        self.queue.push("b")
        self.assertEqual(len(self.queue), 2)
        self.assertEqual(self.queue.pop(), "a")

    def test_full(self):
""",
    '''def parse_header(line):
    """Return a header field's name and value, and a dict of its parameters."""
    name, sep, rest = line.partition(":")
    if not sep:
        raise ValueError("a header field needs a colon: %r" % line)
    value, *parts = rest.split(";")
    parameters = {}
    for part in parts:
        key, sep, text = part.partition("=")
        key = key.strip().lower()
        text = text.strip()
        if len(text) >= 2 and text[0] == text[-1] == '"':
            text = text[1:-1]
''',
    '''    def _send_command(self, command, *arguments, timeout=None):
        """Send one line to the printer and return its answer.

        Raise OSError when the connection is closed, and TimeoutError when
        there is no answer in time.
        """
        if self._socket is None:
            raise OSError("the printer is not connected")
        line = " ".join([command, *map(str, arguments)])
        if "\\n" in line:
            raise ValueError("a command is one line")
        self._socket.settimeout(timeout)
        self._socket.sendall(line.encode("ascii") + b"\\r\\n")
''',
    """def main(argv=None):
    import argparse

    parser = argparse.ArgumentParser(description="Count the words of text files.")
    parser.add_argument("files", nargs="*", help="the files to read")
    parser.add_argument("-v", "--verbose", action="store_true",
                        help="print the name of every file")
    parser.add_argument("-m", "--minimum", type=int, default=1,
                        help="leave out words that are rarer than this")
    args = parser.parse_args(argv)
    counts = {}
    for filename in args.files:
        if args.verbose:
            print(filename)
        with open(filename, encoding="utf-8") as file:
""",
    '''# Colours are tuples of three numbers between 0 and 1.

def to_hex(colour):
    """Return the colour as "#rrggbb"."""
    red, green, blue = (round(255 * part) for part in colour)
    return "#%02x%02x%02x" % (red, green, blue)


def from_hex(text):
    """Return the colour that "#rrggbb" stands for."""
    if len(text) != 7 or text[0] != "#":
        raise ValueError("not a colour: %r" % text)
''',
)
